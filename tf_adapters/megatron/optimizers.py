"""Parameters that a whole step froze: no update, no decay, no change of optimizer state, in each Megatron optimizer.

Megatron's gradient buffers hold zeros for them, and zeros still move a parameter by momentum and weight decay. An
inner optimizer skips a parameter that has no gradient at all, so just before its step theirs are taken away: also
moments of 8 or 16 bits, which have a scale for each parameter, stay as they are to the bit. Only
the step counter goes on, as it does in optimizers that have one for a whole group: Megatron saves no checkpoint of
an optimizer whose parameters count differently. Source: megatron/core/optimizer/optimizer.py, distrib_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from tf_adapters.selection.sampling import HeldValues, Piece
from tf_adapters.training.step_masks import Scale
from tf_adapters.weight_gradients.kept import Kept


class HeldParameters:
    """Keeps chosen parameters and their optimizer state as they are in the next optimizer step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizers = leaves(optimizer)
        self.keepers = {id(inner): Keeper(inner) for inner in map(inner_of, self._optimizers)}

    def hold(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Hold these model parameters from now on, instead of the ones before."""
        chosen = tuple(parameters)
        for optimizer in self._optimizers:
            keeper = self.keepers[id(inner_of(optimizer))]
            keeper.held = [main for parameter in chosen for main in _updated(optimizer, parameter)]


class Keeper:
    """Holds tensors of one inner optimizer through each of its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.held: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []
        self._kept = Kept()

    def before(self, *_: Any) -> None:
        self._kept = Kept()
        own = {id(p) for group in self.inner.param_groups for p in group["params"]}
        for tensor in self.held:
            if id(tensor) not in own:
                continue
            if self.inner.state.get(tensor):
                _drop_gradient(tensor)
                self._counted.append(tensor)
            elif hasattr(self.inner, "initialize_state"):  # Transformer Engine's makes state without a gradient too
                _drop_gradient(tensor)
            else:  # a first step makes its state, out of zeros, and that must not wait
                self._kept.keep([tensor])

    def after(self, *_: Any) -> None:
        for tensor in self._counted:
            state = self.inner.state[tensor]
            if "step" in state:
                state["step"] += 1
        self._counted.clear()
        self._kept.put_back()


def scale_gradients(scales: Iterable[Scale]) -> None:
    """Multiply what a batch has left in the parameters' gradients."""
    for parameter, scale in scales:
        gradient = vars(parameter).get("main_grad", parameter.grad)
        if gradient is not None:
            gradient.mul_(scale)


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


def held_values(optimizer: Any, parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> HeldValues:
    """This rank's values of parameters, by stage and name, as the optimizer updates them.

    That is the parameter, its fp32 copy (bf16 weights would round small updates away) or this rank's shard of either,
    told apart by the tensor- and expert-parallel rank and by where the shard begins.
    """
    optimizers = leaves(optimizer)

    def held(stage: int, name: str) -> tuple[Piece, ...]:
        p = parameters[stage][name]
        # A chain's optimizers all name the parameter itself where none has a copy.
        masters = {_begin(leaf, p): _master(leaf, main) for leaf in optimizers for main in _updated(leaf, p)}
        place = _model_parallel_place(p)
        return tuple(Piece(main, (*place, begin)) for begin, main in masters.items())

    return held


def _master(optimizer: Any, main: torch.Tensor) -> torch.Tensor:
    """What is really updated: a precision-aware optimizer has the fp32 values in its state, ``main`` is their bf16."""
    master = inner_of(optimizer).state.get(main, {}).get("master_param")
    return master if torch.is_tensor(master) and master.is_floating_point() else main


def _begin(optimizer: Any, parameter: torch.nn.Parameter) -> int:
    """Where in the (flat) parameter this rank's shard of it begins."""
    if isinstance(optimizer, DistributedOptimizer):
        return int(optimizer._get_model_param_range_map(parameter)["param"].start)
    return 0


def _model_parallel_place(parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Tensor- and expert-parallel rank, 0 where all ranks of that group hold the same values."""
    is_expert = not getattr(parameter, "allreduce", True)
    is_sharded = is_expert or getattr(parameter, "tensor_model_parallel", False)
    return (
        parallel_state.get_tensor_model_parallel_rank() if is_sharded else 0,
        parallel_state.get_expert_model_parallel_rank() if is_expert else 0,
    )
