"""Where a step ends, and parameters that a whole step froze: both are told by the optimizers' own step hooks."""

from __future__ import annotations

from collections.abc import Sequence

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

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the gradients of held parameters away."""
        if self._controller.in_step:
            for parameter in self._controller.held_parameters():
                parameter.grad = None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End the step if this optimizer was the last."""
        if not self._controller.in_step:  # an update that no pipeline batch came before
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._controller.end_step()
