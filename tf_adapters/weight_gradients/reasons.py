"""Why the host computes a layer's weight gradient itself: the words of the log and the report."""

from __future__ import annotations

ANOTHER_GRADIENT = "its weight gradient is not the product that a tap computes"
OTHER_USES = "its weight is used outside of its own forward"
NOT_CALLED = "its forward did not run in the first step"
NOT_PLAIN = "it is called inside torch.func, or with complex, nested, sparse, distributed or not contiguous tensors"
QUANTIZED = "it computes in MXFP8, FP4 or by a recipe of its own, where taps have not been tested"
NO_ROWS = "it computes in FP8 or FP4, where tokens cannot be sampled"
SPECIAL_WEIGHT = "its weight is no ordinary tensor: it is sharded, or kept in FP8"
CHANGES = "its weight changes within a batch, as where an optimizer steps inside the backward"
WRITTEN_BY_POINTER = "other code writes to its input or output gradient in the backward, unseen by torch (numpy, .data)"
USERS_HOOK = "a hook on its weight may need the gradient of each microbatch at once"
GRADIENT_READ = "other code reads or sets its .grad within a batch"
TAKEN_AT_ONCE = "its gradient is taken by torch.autograd.grad, or by a backward that names its inputs"
SECOND_DERIVATIVE = "a gradient of its gradient is taken (create_graph)"
UNPROVEN = "its gradient has been zero so far, which proves nothing"
HAS_STATE = "its compiled block sets attributes in its forward, or has other layers than at the start"
CHECK_FAILED = "the tap's own computation failed"

SAID = ", as an earlier line says"
"""The end of a reason that a tap has seen, and that a line has named, before a check found it."""

PROVISIONAL = frozenset({UNPROVEN, NOT_CALLED})
"""Reasons that a later check may take back."""
