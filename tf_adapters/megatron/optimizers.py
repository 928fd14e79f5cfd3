"""Parameters that a whole step froze: no update, no decay, no change of optimizer state, in each Megatron optimizer.

Megatron's gradient buffers hold zeros for them, and zeros still move a parameter by momentum and weight decay. An
inner optimizer skips a parameter that has no gradient at all, so just before its step theirs are taken away. Only
the step counter goes on, as it does in optimizers that have one for a whole group: Megatron saves no checkpoint of
an optimizer whose parameters count differently. Source: megatron/core/optimizer/optimizer.py, distrib_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer


class HeldParameters:
    """Keeps chosen parameters and their optimizer state as they are in the next optimizer step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizers = leaves(optimizer)
        self._held: dict[int, list[torch.Tensor]] = {}  # by inner optimizer
        self._hooks: list[Any] = []
        for inner in map(inner_of, self._optimizers):
            keeper = _Keeper(inner)
            self._held[id(inner)] = keeper.held
            self._hooks += [inner.register_step_pre_hook(keeper.before), inner.register_step_post_hook(keeper.after)]

    def hold(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Hold these model parameters from now on, instead of the ones before."""
        chosen = tuple(parameters)
        for optimizer in self._optimizers:
            held = self._held[id(inner_of(optimizer))]
            held[:] = [main for parameter in chosen for main in _updated(optimizer, parameter)]

    def remove(self) -> None:
        """Take the hooks off the optimizers."""
        for hook in self._hooks:
            hook.remove()


class _Keeper:
    """Holds tensors of one inner optimizer through each of its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self.held: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(self, *_: Any) -> None:
        own = {id(p) for group in self._inner.param_groups for p in group["params"]}
        for tensor in self.held:
            if id(tensor) not in own:
                continue
            if self._inner.state.get(tensor):
                _drop_gradient(tensor)
                self._counted.append(tensor)
            else:  # a first step makes its state, out of zeros, and that must not wait
                self._values.append((tensor, tensor.detach().clone()))

    def after(self, *_: Any) -> None:
        for tensor in self._counted:
            state = self._inner.state[tensor]
            if "step" in state:
                state["step"] += 1
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
        self._counted.clear()
        self._values.clear()


def _drop_gradient(tensor: torch.Tensor) -> None:
    tensor.grad = None
    if "decoupled_grad" in vars(tensor):  # where a precision-aware optimizer looks
        tensor.decoupled_grad = None  # type: ignore[attr-defined]


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers that a chained one runs, without stubs; or the one itself."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [leaf for leaf in chained if inner_of(leaf) is not None]


def inner_of(optimizer: Any) -> Any:
    """The torch optimizer that does the arithmetic; None for a rank's stub without parameters."""
    return optimizer.optimizer if isinstance(optimizer, MegatronOptimizer) else optimizer


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
