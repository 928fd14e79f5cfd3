"""Parameters that a whole step froze: no update, no decay, no change of optimizer state, in each Megatron optimizer.

Megatron's gradient buffers hold zeros for them, and zeros still move a parameter by momentum and weight decay. An
inner optimizer skips a parameter that has no gradient at all, so just before its step theirs are taken away.
Source: megatron/core/optimizer/optimizer.py and distrib_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer


class HeldParameters:
    """Keeps chosen parameters and their optimizer state as they are in the next optimizer step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizers = leaves(optimizer)
        self._hooks = [inner_of(o).register_step_pre_hook(self._before_step) for o in self._optimizers]
        self._held: list[torch.Tensor] = []

    def hold(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Hold these model parameters from now on, instead of the ones before."""
        self._held = [main for p in parameters for o in self._optimizers for main in _updated(o, p)]

    def remove(self) -> None:
        """Take the hooks off the optimizers."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, *_: Any) -> None:
        for tensor in self._held:
            tensor.grad = None
            if "decoupled_grad" in vars(tensor):  # where a precision-aware optimizer looks
                tensor.decoupled_grad = None  # type: ignore[attr-defined]


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers that a chained one runs, without stubs; or the one itself."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [leaf for leaf in chained if inner_of(leaf) is not None]


def inner_of(optimizer: Any) -> Any:
    """The torch optimizer that does the arithmetic; None for a rank's stub without parameters."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def _updated(optimizer: Any, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """The tensors that the inner optimizer updates for a model parameter: itself, its fp32 copy, or a shard of it."""
    if isinstance(optimizer, DistributedOptimizer):
        place = optimizer.model_param_group_index_map.get(parameter)
        if place is None:
            return []  # another rank's shard, or another optimizer's
        group, position = place
        return [optimizer.optimizer.param_groups[group]["params"][position]]
    main = vars(parameter).get("main_param")
    return [parameter] if main is None else [main]
