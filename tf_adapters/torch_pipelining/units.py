"""Parameters that stages share or the loss trains, and what of its parameters a rank holds."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tf_adapters.measuring.estimates import grouped
from tf_adapters.selection.sampling import HeldValues, Piece
from tf_adapters.selection.units import Tie

TRAINED_BY_LOSS = "timely_freeze_trained_by_loss"
"""Of a stage's module: the names of layers that the loss computes with, where the loss holds the whole module."""


def shared_parameters(parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> tuple[Tie, ...]:
    """Parameters that several stages of this rank hold as one object, as a V-shaped schedule's ends may."""
    places = grouped((id(p), (stage, name)) for stage, of_stage in parameters.items() for name, p in of_stage.items())
    return tuple(tuple(held) for held in places.values() if len(held) > 1)


def trained_by_loss(loss: Any, model: torch.nn.Module) -> frozenset[str]:
    """The parameters of a stage's module that its loss computes with: by layers of it that the loss holds.

    TorchTitan's ChunkedLossWrapper, for one, runs the output layer forward and backward inside the loss: no mask of
    ours is on there, and no time of ours holds it. A loss that knows the whole model says nothing: there the module
    may be marked (``TRAINED_BY_LOSS``).
    """
    layers = {id(part) for part in model.modules() if part is not model}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [thing for thing in _held_by(loss) if isinstance(thing, torch.nn.Module) and id(thing) in layers]
    held += [model.get_submodule(name) for name in getattr(model, TRAINED_BY_LOSS, ())]
    return frozenset(names[id(p)] for layer in held for p in layer.parameters() if id(p) in names)


def _held_by(thing: Any, depth: int = 4, seen: set[int] | None = None) -> Iterator[Any]:
    """What a function or an object holds: in its closure, as a bound method or partial, in its attributes."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    yield thing
    if depth == 0 or isinstance(thing, (torch.nn.Module, torch.Tensor, type, types.ModuleType)):
        return
    if isinstance(thing, functools.partial):
        inside: list[Any] = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, types.MethodType):
        inside = [thing.__self__, thing.__func__]
    elif isinstance(thing, types.FunctionType):
        inside = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
    else:
        inside = list(getattr(thing, "__dict__", {}).values())
    for held in inside:
        yield from _held_by(held, depth - 1, seen)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


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
