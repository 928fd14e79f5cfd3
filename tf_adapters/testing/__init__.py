"""For tests of host adapters, ours and yours: real ranks over gloo, and oracles for what they must compute."""

from tf_adapters.testing.oracle import masked_gradients, relative_error
from tf_adapters.testing.plans import force_order, force_plan
from tf_adapters.testing.ranks import RankPool, RanksFailed

__all__ = ["RankPool", "RanksFailed", "force_order", "force_plan", "masked_gradients", "relative_error"]
