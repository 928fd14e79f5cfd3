"""Layers of a stage of which rows can be frozen, and this rank's elements of them.

Under fully_shard a layer computes with its whole weight, which FSDP puts into the sharded one's place. Tensor-parallel
layers compute with DTensors and are frozen whole.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tf_adapters.masking.held_rows import HeldRows
from tf_adapters.masking.rows import RowLayer, RowMask, layer_of_kind, plain_layer, row_layers


def row_mask(stage: torch.nn.Module) -> RowMask:
    """The layers of a stage's module of which rows can be frozen."""
    return RowMask(row_layers(stage, sharded_layer if isinstance(stage, FSDPModule) else plain_layer))


def sharded_layer(module: torch.nn.Module) -> RowLayer | None:
    """Rows of a layer whose weight FSDP shards by rows in one dimension, and nothing else shards."""
    weight = vars(module)["_parameters"].get("weight")
    if not isinstance(weight, DTensor) or weight.device_mesh.ndim > 1 or not weight.placements[0].is_shard(0):
        return None
    # FSDP makes a class of its own of a module that it is applied to: itself, then the module's.
    return layer_of_kind(module, type(module).__bases__[1] if isinstance(module, FSDPModule) else type(module))


def elements(held: HeldRows, tensor: torch.Tensor) -> list[torch.Tensor]:
    """This rank's elements of held rows in a parameter, or in what an optimizer keeps for it."""
    if not isinstance(tensor, DTensor):
        return held.of(tensor)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return held.of(tensor.to_local(), offset[0] * held.width)
