"""Masks under data parallelism: what DDP and FSDP must be told of gradients that will not come.

Replicas draw the same masks, so both reduce the same tensors everywhere.
Source: torch/distributed/pipelining/stage.py, torch/nn/parallel/distributed.py,
torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tf_adapters.masking.taps import TappedLayer, plain_layer


def frozen_replica(module: torch.nn.Module, names: Iterable[str]) -> AbstractContextManager[None]:
    """Freeze what the module itself computes with, beside the parameters that its optimizer knows."""
    return _unsharded_frozen(module, tuple(names)) if isinstance(module, FSDPModule) else nullcontext()


@contextmanager
def _unsharded_frozen(module: torch.nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """FSDP puts unsharded parameters into the place of the sharded ones while it computes.

    It gives them the sharded ones' ``requires_grad`` when it gathers them, and the pipeline gathers them long before
    a microbatch and keeps them for several: so they are frozen, and put back, by themselves.
    """
    _require_grad(module, names, False)
    try:
        yield
    finally:
        _require_grad(module, names, True)


def linear_layer(stage: torch.nn.Module) -> Callable[[torch.nn.Module], TappedLayer | None]:
    """What finds the layers of a stage whose weight gradients can be computed apart.

    FSDP holds a shard of a weight as a DTensor and has the layer compute with all of it. Tensor parallelism has a
    layer compute with a DTensor, and so has both together, whose mesh has more dimensions: these have no tap.
    """

    def layer(module: torch.nn.Module) -> TappedLayer | None:
        weight = getattr(module, "weight", None)
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


def _require_grad(module: torch.nn.Module, names: tuple[str, ...], required: bool) -> None:
    for name in names:
        module.get_parameter(name).requires_grad_(required)


def report_to_reducer(module: torch.nn.Module, names: Iterable[str]) -> None:
    """After a stage's backward that DDP's reducer may wait in: fire its hooks for what was frozen there.

    It waits in a batch's last backward, for every parameter, to reduce what the earlier microbatches have left in the
    gradients. In the first it may: the metadata pass of a first step runs the module outside of ``no_sync``, after
    which the reducer waits too. A zero gradient fires the hooks; where the reducer does not wait, they do nothing.
    """
    if isinstance(module, DistributedDataParallel):
        frozen = [module.get_parameter(name) for name in names]
        if frozen:
            torch.autograd.backward([p.view_as(p) for p in frozen], [torch.zeros_like(p) for p in frozen])
