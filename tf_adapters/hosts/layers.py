"""Find the layers of a stage's module. A pipeline may be cut between layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tf_adapters.measuring.estimates import grouped
from tf_adapters.measuring.layer_times import Layers
from tf_adapters.selection.freeze_units import FreezeUnit, joined

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return a stage's layers by name: items of its outermost module lists, and modules outside of these."""
    return dict(_layers("", model))


def layer_of(name: str, layers: Layers) -> str | None:
    """Return the layer that contains a module or parameter of this name; None if it is outside of all layers."""
    return next((layer for layer in layers if name == layer or name.startswith(f"{layer}.")), None)


def blocks(units: Sequence[FreezeUnit], layers: Layers) -> tuple[FreezeUnit, ...]:
    """Join units by layer, so that a layer is frozen as a whole. Units outside of all layers stay as they are."""
    by_layer = grouped((layer_of(unit.names[0], layers) or unit.names[0], unit) for unit in units)
    return tuple(map(joined, by_layer.values()))


def _layers(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    dot = f"{name}." if name else ""
    if isinstance(module, (*_LISTS, torch.nn.Sequential)):
        for child_name, child in module.named_children():
            if isinstance(child, _LISTS):  # a list computes nothing itself
                yield from _layers(dot + child_name, child)
            else:
                yield dot + child_name, child
        return
    lists = any(isinstance(part, (*_LISTS, torch.nn.Sequential)) for part in module.modules())
    if name and not lists:
        yield name, module
        return
    for child_name, child in module.named_children():
        if any(True for _ in child.parameters()):
            yield from _layers(dot + child_name, child)
