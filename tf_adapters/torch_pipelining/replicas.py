"""Masks under data parallelism: what DDP and FSDP must be told of gradients that will not come.

Replicas draw the same masks, so both reduce the same tensors everywhere.
Source: torch/distributed/pipelining/stage.py, torch/nn/parallel/distributed.py,
torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tf_adapters.weight_gradients.taps import TappedLayer, plain_layer


def replica_count(module: torch.nn.Module) -> int:
    """The replicas of a stage in DDP; 1 of any other, whoever else may average its gradients."""
    return int(module.process_group.size()) if isinstance(module, DistributedDataParallel) else 1


def inside_replica(module: torch.nn.Module) -> torch.nn.Module:
    """A stage's own module: parameters have the same names with and without DDP around it."""
    inside: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inside


@contextmanager
def frozen_replica(module: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Freeze what the module itself computes with, beside the parameters that its optimizer knows.

    FSDP puts unsharded parameters into the place of the sharded ones while it computes. It gives them the sharded ones'
    ``requires_grad`` when it gathers them, and the pipeline gathers them long before a microbatch and keeps them for
    several: so they are frozen, and put back, by themselves.
    """
    unsharded = names if isinstance(module, FSDPModule) else ()
    for name in unsharded:
        module.get_parameter(name).requires_grad_(False)
    try:
        yield
    finally:
        for name in unsharded:
            module.get_parameter(name).requires_grad_(True)


def linear_layer(stage: torch.nn.Module) -> Callable[[torch.nn.Module], TappedLayer | None]:
    """What finds the layers of a stage whose weight gradients can be computed apart.

    FSDP holds a shard of a weight as a DTensor and has the layer compute with all of it. Tensor parallelism has a
    layer compute with a DTensor, and so has both together, whose mesh has more dimensions: these have no tap.
    """

    def layer(module: torch.nn.Module) -> TappedLayer | None:
        weight = vars(module)["_parameters"].get("weight")  # a parametrization would compute one, and maybe change
        sharded = isinstance(stage, FSDPModule) and isinstance(weight, DTensor) and weight.device_mesh.ndim == 1
        return plain_layer(module, DTensor if sharded else torch.nn.Parameter)

    return layer


def reshards_after_forward(module: Any) -> bool:
    """Whether FSDP gives a part's unsharded parameters up after its forward; torch decides it for the root itself."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            kept = part is module and state._auto_reshard_after_forward
            if not kept and any(group.post_forward_mesh_info for group in state._fsdp_param_groups):
                return True
    return False


@contextmanager
def reported_to_reducer(module: torch.nn.Module, names: Iterable[str], first: bool, last: bool) -> Iterator[None]:
    """Around a stage's backward: as it begins, DDP's reducer hears of the gradients that will not come in it.

    It reduces a bucket when it has heard of all of its parameters, to overlap that with what is left of the backward.
    It waits for them in the ``last`` backward of a batch, once it has been prepared for it. In the ``first`` it may:
    the metadata pass of a first step runs the module outside of ``no_sync``. Where it does not, nothing happens.
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


class _Preparing:
    """DDP's reducer, with something to be called whenever it has been prepared for a backward."""

    def __init__(self, reducer: Any, prepared: Callable[[], None]) -> None:
        self._reducer, self._prepared = reducer, prepared

    def prepare_for_backward(self, outputs: Any) -> None:
        self._reducer.prepare_for_backward(outputs)
        self._prepared()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def _fire_hooks(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Fire the hooks behind these parameters' gradients and leave the gradients themselves as they are."""
    required = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(True)
    with torch.enable_grad():
        _NoGradients.apply(*parameters).backward()  # type: ignore[no-untyped-call]
    for parameter, before in zip(parameters, required, strict=True):
        parameter.requires_grad_(before)


class _NoGradients(torch.autograd.Function):
    """A scalar whose backward reaches its arguments with nothing: no zeros are made for them."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.count)
