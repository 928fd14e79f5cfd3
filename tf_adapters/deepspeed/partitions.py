"""Steps of an optimizer that pass over parts of a flat partition, without a copy of these parts or of their state.

An optimizer that works element by element does to a view what it does to the whole. For one step, the views of what is
left take the partition's place in its parameter group, each with views of its gradient and state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["Part", "PartialSteps", "works_by_element"]

Part = tuple[int, int]
"""Where a part of a partition begins, and where it ends."""

_BY_ELEMENT = {
    *(f"torch.optim.{name}" for name in ("adam.Adam", "adamw.AdamW", "sgd.SGD", "adagrad.Adagrad", "rmsprop.RMSprop")),
    *(f"torch.optim.{name}" for name in ("adamax.Adamax", "nadam.NAdam", "radam.RAdam", "adadelta.Adadelta")),
    "deepspeed.ops.adam.fused_adam.FusedAdam",
}


def works_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step does to each element what it would do to it alone; of other optimizers nothing is known."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__name__}" in _BY_ELEMENT


class PartialSteps:
    """Lets steps of one optimizer pass over parts of tensors; ``restore`` comes after each of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._replaced: list[tuple[dict[str, Any], list[torch.Tensor]]] = []  # groups, and their own parameters
        self._views: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def skip(self, flat: torch.Tensor, parts: Iterable[Part]) -> None:
        """Let the step that follows pass over these parts of a tensor that the optimizer has a state for."""
        group = next(g for g in self._optimizer.param_groups if any(p is flat for p in g["params"]))
        views = [] if flat.grad is None else [self._view(flat, run) for run in _between(parts, flat.numel())]
        self._replaced.append((group, group["params"]))
        group["params"] = [view for p in group["params"] for view in (views if p is flat else [p])]
        self._views.append((flat, views))

    def restore(self) -> None:
        """Put the tensors back into their groups; what their state counts for a whole tensor goes on."""
        for group, parameters in reversed(self._replaced):
            group["params"] = parameters
        for flat, views in self._views:
            state = self._optimizer.state[flat]
            parts = [self._optimizer.state.pop(view) for view in views]
            for name, value in state.items():
                if not _by_element(value, flat):
                    state[name] = parts[-1][name] if parts else value + 1 if name == "step" else value
        self._replaced.clear()
        self._views.clear()

    def _view(self, flat: torch.Tensor, run: Part) -> torch.Tensor:
        start, length = run[0], run[1] - run[0]
        view = flat.detach().narrow(0, start, length)
        assert flat.grad is not None
        view.grad = flat.grad.narrow(0, start, length)
        self._optimizer.state[view] = {
            name: value.narrow(0, start, length)
            if _by_element(value, flat)
            else value.clone()
            if torch.is_tensor(value)
            else value
            for name, value in self._optimizer.state[flat].items()
        }
        return view


def _between(parts: Iterable[Part], length: int) -> Iterator[Part]:
    begin = 0
    for start, stop in [*sorted(parts), (length, length)]:
        if begin < start:
            yield begin, start
        begin = max(begin, stop)


def _by_element(value: Any, flat: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == flat.shape
