"""Parameters that stages share, and what of its parameters a rank holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from tf_adapters.selection.sampling import HeldValues, Piece
from tf_adapters.selection.units import Tie


def shared_parameters(parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> tuple[Tie, ...]:
    """Parameters that several stages of this rank hold as one object, as a V-shaped schedule's ends may."""
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, of_stage in parameters.items():
        for name, parameter in of_stage.items():
            places.setdefault(id(parameter), []).append((stage, name))
    return tuple(tuple(held) for held in places.values() if len(held) > 1)


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's part of a parameter's gradient, if there is one."""
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def held_values(parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> HeldValues:
    """This rank's values of parameters, by stage and name: whole, or its shard where FSDP2 or tensor parallelism cut.

    Shards are told apart by the rank's coordinates in the dimensions of the device mesh that they are cut along.
    """

    def held(stage: int, name: str) -> tuple[Piece, ...]:
        parameter = parameters[stage][name].detach()
        if not isinstance(parameter, DTensor):
            return (Piece(parameter),)
        place = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
        part = tuple(0 if placement.is_replicate() else coordinate for coordinate, placement in place)
        return (Piece(parameter.to_local(), part),)

    return held
