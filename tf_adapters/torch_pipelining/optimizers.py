"""Where a step ends, and parameters that a whole step froze: both are told by the optimizers' own step hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tf_adapters.training.controller import Controller


class Updates:
    """Watches the optimizers of one rank, which update its stages once a step.

    A parameter that every microbatch froze gets no gradient, so the optimizer passes it by: its value, momentum and
    step count stay. Without this ``zero_grad(set_to_none=False)`` or a reducer would leave it a zero gradient, and
    zeros still move a parameter by momentum and decay. The step ends when every optimizer has stepped.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], controller: Controller) -> None:
        self._controller = controller
        self._optimizers = tuple(optimizers)
        self._stepped: set[int] = set()
        self._hooks = [hook for optimizer in optimizers for hook in self._watch(optimizer)]

    def remove(self) -> None:
        """Take the hooks off the optimizers."""
        for hook in self._hooks:
            hook.remove()

    def _watch(self, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._controller.in_step:
            for parameter in self._controller.held_parameters():
                parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._controller.in_step:  # an update that no pipeline batch came before
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._controller.end_step()
