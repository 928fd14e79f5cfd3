"""Masks under data parallelism: make DDP and FSDP work with parameters that get no gradient.

Replicas draw the same masks, so both reduce the same tensors everywhere.
Source: torch/distributed/pipelining/stage.py, torch/nn/parallel/distributed.py,
torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tf_adapters.weight_gradients.engine_taps import linear_layer
from tf_adapters.weight_gradients.tapped_layer import LinearTap, TappedLayer


def is_replicated(module: torch.nn.Module) -> bool:
    """Return whether DDP or FSDP changes the gradients of a part of this module, too."""
    return any(isinstance(part, (DistributedDataParallel, FSDPModule)) for part in module.modules())


def inside_replica(module: torch.nn.Module) -> torch.nn.Module:
    """Return a stage's module without DDP, so that parameters have the same names with and without it."""
    inside: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inside


def trained_replica(module: torch.nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return those names of an FSDP module whose parameters train now; nothing for another module.

    Called before a mask is in force: a parameter that does not train then was frozen by the user, and must stay frozen.
    """
    if not isinstance(module, FSDPModule):
        return ()
    return tuple(name for name in names if module.get_parameter(name).requires_grad)


@contextmanager
def frozen_replica(module: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Freeze the unsharded parameters that an FSDP module computes with. ``names`` are from ``trained_replica``.

    FSDP replaces sharded parameters by unsharded ones while it computes. They take over ``requires_grad`` when FSDP
    gathers them. The pipeline gathers them long before a microbatch and keeps them for several microbatches, so they
    must be frozen and restored separately.
    """
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    try:
        yield
    finally:
        for name in names:
            module.get_parameter(name).requires_grad_(True)


def layers_with_taps(stage: torch.nn.Module, sampled: bool) -> Callable[[torch.nn.Module], TappedLayer | None]:
    """Return a function that makes the tap of a layer of this stage, or None for a layer without one.

    Under FSDP alone, a weight is a DTensor shard and the layer computes with the gathered weight: it can be tapped.
    Under tensor parallelism, also together with FSDP, a layer computes with a DTensor: it has no tap.
    """

    is_sharded = isinstance(stage, FSDPModule)  # the taps of a run that failed keep no stage alive

    def layer(module: torch.nn.Module) -> TappedLayer | None:
        weight = vars(module)["_parameters"].get("weight")  # a parametrization would compute it
        if not (is_sharded and isinstance(weight, DTensor) and weight.device_mesh.ndim == 1):
            return linear_layer(module, sampled)
        if type(module).__bases__ == (FSDPModule, torch.nn.Linear):  # fully_shard was applied to the layer itself
            return LinearTap(module) if weight.requires_grad else None
        return linear_layer(module, sampled, DTensor)

    return layer


def reshards_after_forward(module: Any) -> bool:
    """Return whether FSDP frees a part's unsharded parameters after its forward. Torch decides it for the root."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            kept = part is module and state._auto_reshard_after_forward
            if not kept and any(group.post_forward_mesh_info for group in state._fsdp_param_groups):
                return True
    return False


def sharded_groups(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP gathers and reduces together."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield from part._get_fsdp_state()._fsdp_param_groups


def adds_up_in_another_type(module: torch.nn.Module) -> bool:
    """Return whether FSDP adds up gradients of microbatches in another type than theirs, such as bf16 ones in fp32."""
    for group in sharded_groups(module):
        policy = group.mp_policy
        types = {policy.param_dtype or parameter.sharded_param.dtype for parameter in group.fsdp_params}
        if policy.reduce_dtype is not None and types != {policy.reduce_dtype}:
            return True
    return False


def unsharded_adder(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that adds gradients to FSDP's sums if they were computed outside of a backward.

    The sums may be in another type than the gradients. FSDP itself adds to them at the end of each backward
    (``FSDPParamGroup.post_backward``). Without this, gradients of several microbatches would be added up in the type in
    which the parameters compute, such as bf16.
    """
    groups = [ref(group) for group in sharded_groups(module)]  # a run that failed keeps no model alive

    def add_up() -> None:
        for group in groups:
            for parameter in getattr(group(), "fsdp_params", ()):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

    return add_up


@contextmanager
def reported_to_reducer(module: torch.nn.Module, names: Iterable[str], first: bool, last: bool) -> Iterator[None]:
    """Run a stage's backward inside, and tell DDP's reducer at its start which gradients will be missing.

    The reducer reduces a bucket when all of its parameters have reported, so that the reduction overlaps the rest of
    the backward. It expects reports in the ``last`` backward of a batch, after it was prepared. In the ``first``
    backward it may expect them, because the metadata pass of a first step runs the module outside of ``no_sync``. In
    other backwards a report has no effect.
    """
    frozen = [inside_replica(module).get_parameter(name) for name in names]
    if not (frozen and isinstance(module, DistributedDataParallel) and (first or last)):
        yield
        return
    if not last:
        _fire_hooks(frozen)
        yield
        return
    reducer = module.reducer
    module.reducer = _Preparing(reducer, lambda: _fire_hooks(frozen))  # type: ignore[assignment]
    try:
        yield
    finally:
        module.reducer = reducer


def reduces_in_backward(module: torch.nn.Module) -> bool:
    """Return whether the gradients are reduced by hooks that run in the last backward of a batch."""
    return isinstance(module, DistributedDataParallel)


def reduce_gradients(module: Any, except_for: Collection[torch.nn.Parameter] = ()) -> None:
    """Let DDP's reducer reduce a stage's gradients at the end of a batch.

    The reducer has the buckets, the communication hook and the sums that it would have in the last backward. It takes
    the gradients from ``.grad``, so they need not come from a backward. All backwards of the batch must have run
    without a reduction (``no_sync``). Parameters in ``except_for`` still get more gradients, and are reduced after
    these have been added. As at the end of a backward, all are reduced when the last gradient has been given.
    """
    module.reducer.prepare_for_backward([])
    later = set(map(id, except_for))
    whole = [parameter for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in later]
    if whole:
        _fire_hooks(whole)


class _Preparing:
    """DDP's reducer with a function that is called whenever the reducer is prepared for a backward."""

    def __init__(self, reducer: Any, prepared: Callable[[], None]) -> None:
        self._reducer, self._prepared = reducer, prepared

    def prepare_for_backward(self, outputs: Any) -> None:
        self._reducer.prepare_for_backward(outputs)
        self._prepared()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def _fire_hooks(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Fire the hooks on these parameters' gradients without a change of the gradients."""
    required = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            _NoGradients.apply(*parameters).backward()  # type: ignore[no-untyped-call]
    finally:
        for parameter, before in zip(parameters, required, strict=True):
            parameter.requires_grad_(before)


class _NoGradients(torch.autograd.Function):
    """A scalar whose backward passes None to its arguments, so no zeros are allocated."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.count)
