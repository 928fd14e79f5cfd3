"""An unbiased estimate, for the study only: gradients that are not masked, divided by the chance to be computed.

The paper counts a skipped gradient as zero, so a parameter's mean gradient is (1 - AFR) times the whole one. Divided by
that chance it is the whole one in expectation, with more variance. ``--set gradient_scale=inverse`` makes such runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tf_adapters.hosts.adapter import HostAdapter

INVERSE = "inverse"


class InverseScale:
    """Scales the gradients of one stage of torch.distributed.pipelining while ``adapter`` freezes.

    Uniform masks only: under them the chance of every parameter is 1 - AFR of its microbatch's backward.
    """

    def __init__(self, stage: Any, parameters: Iterable[nn.Parameter], adapter: HostAdapter) -> None:
        self._controller = controller = adapter.controller
        self._stage = stage.stage_index
        self._factor = 1.0
        run = stage.backward_one_chunk

        @functools.wraps(run)
        def backward_one_chunk(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            self._factor = self._of(bwd_chunk_id) if controller.in_step else 1.0
            try:
                return run(bwd_chunk_id, *args, **kwargs)
            finally:
                self._factor = 1.0

        # Through the adapter, so that detaching takes it back before the adapter's own.
        adapter.overrides.set(stage, "backward_one_chunk", backward_one_chunk)
        for parameter in parameters:
            parameter.register_hook(self._scaled)

    def _of(self, microbatch: int) -> float:
        action = self._controller.freezable[self._stage, microbatch]
        computed = 1.0 - self._controller.actual_freeze_ratio(self._controller.step, action)
        return 1.0 / computed if computed > 0.0 else 1.0  # nothing is computed, nothing to scale

    def _scaled(self, gradient: Tensor) -> Tensor:
        return gradient if self._factor == 1.0 else gradient * self._factor
