"""Find parameters that stages share, parameters that the loss trains, and a rank's part of each parameter."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tf_adapters.measuring.estimates import grouped
from tf_adapters.selection.freeze_units import Tie
from tf_adapters.selection.sampling import HeldValues, ParameterPiece

TRAINED_BY_LOSS = "timely_freeze_trained_by_loss"
"""Attribute of a stage's module: names of the layers that the loss computes with, if the loss has the whole module."""


def shared_parameters(parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> tuple[Tie, ...]:
    """Return parameters that are one object on several stages of this rank, as at the ends of a V-shaped schedule."""
    places = grouped((id(p), (stage, name)) for stage, of_stage in parameters.items() for name, p in of_stage.items())
    return tuple(tuple(held) for held in places.values() if len(held) > 1)


def trained_by_loss(loss: Any, model: torch.nn.Module) -> frozenset[str]:
    """Return the parameters of a stage's module that the loss computes with: those of layers that it refers to.

    For example, TorchTitan's ChunkedLossWrapper runs the output layer forward and backward inside the loss, where masks
    and timing do not apply. If a loss refers to the whole model, these layers cannot be found; the module may then be
    marked (``TRAINED_BY_LOSS``).
    """
    layers = {id(part) for part in model.modules() if part is not model}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [thing for thing in _held_by(loss) if isinstance(thing, torch.nn.Module) and id(thing) in layers]
    held += [model.get_submodule(name) for name in getattr(model, TRAINED_BY_LOSS, ())]
    return frozenset(names[id(p)] for layer in held for p in layer.parameters() if id(p) in names)


def _held_by(thing: Any, depth: int = 4, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the objects that a function or object refers to: closure, bound method, partial, attributes."""
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


def with_alike_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Return the parameters that have gradients, by the device mesh of the gradients. Plain tensors have none.

    Torch computes no norm of DTensors and plain tensors together. Both occur in a stage with tensor parallelism.
    """
    meshes = ((getattr(p.grad, "device_mesh", None), p) for p in parameters if p.grad is not None)
    return list(grouped(meshes).values())


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return the 2-norm of the gradients, a plain scalar, of parameters ``with_alike_gradients``."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of a parameter's gradient, or None."""
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def held_values(parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> HeldValues:
    """Return a function that gives this rank's values of a parameter, by stage and name.

    They are the whole parameter, or this rank's shard under FSDP2 or tensor parallelism. The rank's coordinates in the
    sharded dimensions of the device mesh identify the shard.
    """

    def held(stage: int, name: str) -> tuple[ParameterPiece, ...]:
        parameter = parameters[stage][name].detach()
        if not isinstance(parameter, DTensor):
            return (ParameterPiece(parameter),)
        place = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
        part = tuple(0 if placement.is_replicate() else coordinate for coordinate, placement in place)
        return (ParameterPiece(parameter.to_local(), part),)

    return held
