"""Which modules of a stage are its layers: what a pipeline may be cut between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tf_adapters.measuring.estimates import grouped
from tf_adapters.measuring.layers import Layers
from tf_adapters.selection.units import FreezeUnit, joined

__all__ = ["blocks", "layer_of", "layers_of"]

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The layers of a stage's module by name: members of its outermost lists of modules, and modules beside these."""
    return dict(_layers("", model))


def layer_of(name: str, layers: Layers) -> str | None:
    """The layer that a module or parameter of this name is, or is part of; None outside of all layers."""
    return next((layer for layer in layers if name == layer or name.startswith(f"{layer}.")), None)


def blocks(units: Sequence[FreezeUnit], layers: Layers) -> tuple[FreezeUnit, ...]:
    """Units joined by layer: each is frozen whole or not at all. What is outside of all layers stays as it is."""
    by_layer = grouped((layer_of(unit.names[0], layers) or unit.names[0], unit) for unit in units)
    return tuple(map(joined, by_layer.values()))


def _layers(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    dot = f"{name}." if name else ""
    if isinstance(module, (*_LISTS, torch.nn.Sequential)):
        for child_name, child in module.named_children():
            if isinstance(child, _LISTS):  # which computes nothing itself
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
