"""Leave parameters that a whole step froze unchanged, in each Megatron optimizer: no update, no decay, same state.

Megatron's gradient buffers hold zeros for them, and momentum and weight decay then still move the parameter. An inner
optimizer skips a parameter without a gradient, so the gradients are removed just before its step. Moments of 8 or 16
bits, which have a scale for each parameter, then also stay the same to the bit. Only the step counter advances, as in
optimizers with one counter for a group, because Megatron cannot save an optimizer whose parameters count differently.
Source: megatron/core/optimizer/optimizer.py, distrib_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from tf_adapters.hosts.held_copies import HeldCopies
from tf_adapters.selection.sampling import HeldValues, ParameterPiece
from tf_adapters.training.step_masks import Scale


def meets(optimizer: Any) -> bool:
    """Return whether a step of this optimizer exchanges the norm of the gradients with the other ranks of the pipeline.

    Otherwise a rank may skip its own step, and the job still trains.
    """
    if isinstance(optimizer, ChainedOptimizer):
        return bool(optimizer.chained_optimizers)
    return isinstance(optimizer, MegatronOptimizer) and optimizer.config.clip_grad > 0


class HeldParameters:
    """Leaves chosen parameters and their optimizer state unchanged in each step of one of ``leaves(optimizer)``."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self.inner = optimizer, inner_of(optimizer)
        self._held: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []
        self._kept = HeldCopies()

    def hold(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Hold these model parameters from now on, instead of earlier ones."""
        self._held = [main for parameter in parameters for main in _updated(self._optimizer, parameter)]

    def before(self, *_: Any) -> None:
        self._kept = HeldCopies()
        own = {id(p) for group in self.inner.param_groups for p in group["params"]}
        for tensor in self._held:
            if id(tensor) not in own:
                continue
            if self.inner.state.get(tensor):
                _drop_gradient(tensor)
                self._counted.append(tensor)
            elif hasattr(self.inner, "initialize_state"):
                _drop_gradient(tensor)  # Transformer Engine's optimizer makes state without a gradient
            else:  # no state yet: the step makes it from a gradient of zeros, and the values are put back afterwards
                self._kept.keep([tensor])

    def after(self, *_: Any) -> None:
        for tensor in self._counted:
            state = self.inner.state[tensor]
            if "step" in state:
                state["step"] += 1
        self._counted.clear()
        self._kept.put_back()


def scale_gradients(scales: Iterable[Scale]) -> None:
    """Multiply the accumulated gradients of parameters by their scales."""
    for parameter, scale in scales:
        gradient = vars(parameter).get("main_grad", parameter.grad)
        if gradient is not None:
            gradient.mul_(scale)


def _drop_gradient(tensor: torch.Tensor) -> None:
    tensor.grad = None
    if "decoupled_grad" in vars(tensor):  # a precision-aware optimizer reads this
        tensor.decoupled_grad = None  # type: ignore[attr-defined]


def leaves(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chained optimizer, without stubs, or the optimizer itself."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [leaf for leaf in chained if inner_of(leaf) is not None]


def inner_of(optimizer: Any) -> Any:
    """Return the inner torch optimizer; None for a stub of a rank without parameters."""
    return optimizer.optimizer if isinstance(optimizer, MegatronOptimizer) else optimizer


def _updated(optimizer: Any, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """Return the tensors that the inner optimizer updates for a parameter: itself, its fp32 copy, or a shard."""
    if isinstance(optimizer, DistributedOptimizer):
        place = optimizer.model_param_group_index_map.get(parameter)
        if place is None:
            return []  # it belongs to another rank or optimizer
        group, position = place
        return [optimizer.optimizer.param_groups[group]["params"][position]]
    main = vars(parameter).get("main_param")
    return [parameter] if main is None else [main]


def held_values(optimizer: Any, parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> HeldValues:
    """Return a function that gives this rank's values of a parameter, by stage and name, as the optimizer updates them.

    These are the parameter, its fp32 copy (bf16 weights would round small updates away), or this rank's shard of
    either. The tensor-parallel rank, the expert-parallel rank and the shard's start identify a piece.
    """
    optimizers = leaves(optimizer)

    def held(stage: int, name: str) -> tuple[ParameterPiece, ...]:
        p = parameters[stage][name]
        # Without fp32 copies, every optimizer of a chain returns the parameter itself.
        masters = {_begin(leaf, p): _master(leaf, main) for leaf in optimizers for main in _updated(leaf, p)}
        place = _model_parallel_place(p)
        return tuple(ParameterPiece(main, (*place, begin)) for begin, main in masters.items())

    return held


def _master(optimizer: Any, main: torch.Tensor) -> torch.Tensor:
    """Return the updated tensor. A precision-aware optimizer keeps fp32 values in its state; ``main`` is their bf16."""
    master = inner_of(optimizer).state.get(main, {}).get("master_param")
    return master if torch.is_tensor(master) and master.is_floating_point() else main


def _begin(optimizer: Any, parameter: torch.nn.Parameter) -> int:
    """Return the start of this rank's shard in the flat parameter."""
    if isinstance(optimizer, DistributedOptimizer):
        return int(optimizer._get_model_param_range_map(parameter)["param"].start)
    return 0


def _model_parallel_place(parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return tensor- and expert-parallel rank; 0 if all ranks of that group hold the same values."""
    is_expert = not getattr(parameter, "allreduce", True)
    is_sharded = is_expert or getattr(parameter, "tensor_model_parallel", False)
    return (
        parallel_state.get_tensor_model_parallel_rank() if is_sharded else 0,
        parallel_state.get_expert_model_parallel_rank() if is_expert else 0,
    )
