"""Which modules of a stage are its layers: what a pipeline may be cut between."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tf_adapters.masking.compiled import is_compiled

__all__ = ["layers_of"]

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The layers of a stage's module by name: members of its outermost lists of modules, and what stands beside them.

    None where one is compiled: hooks on it would compile it anew.
    """
    layers = dict(_layers("", model))
    return {} if any(is_compiled(part) for layer in layers.values() for part in layer.modules()) else layers


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
