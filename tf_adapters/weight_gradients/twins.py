"""A module's twin: the same parameters, buffers and code, with other layers in some places.

The host's module is not changed. Layers that are not replaced are the host's own objects. Of each module around a
replaced layer the twin has a copy that shares its parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_OWN = frozenset({"_modules", "_compiled_call_impl"})
"""Attributes that a copy has for itself."""


class Twin:
    """The twin of ``module`` with ``replaced`` layers, by the ``id`` of the host's layer."""

    def __init__(self, module: torch.nn.Module, replaced: Mapping[int, torch.nn.Module]) -> None:
        self._pairs: list[tuple[torch.nn.Module, torch.nn.Module, dict[str, Any]]] = []
        self._copies = dict(replaced)
        self.module = self._twin(module)

    def _twin(self, module: torch.nn.Module) -> torch.nn.Module:
        if id(module) in self._copies:
            return self._copies[id(module)]
        children = {name: child and self._twin(child) for name, child in module._modules.items()}
        if all(child is module._modules[name] for name, child in children.items()):
            return module
        copy = type(module).__new__(type(module))
        vars(copy).update(vars(module), _modules=children)
        vars(copy).pop("_compiled_call_impl", None)
        self._copies[id(module)] = copy
        self._pairs.append((module, copy, dict(module._modules)))
        return copy

    def follow(self) -> bool:
        """Take over what has changed in the host's modules. Return False if other layers are in them now."""
        for module, copy, children in self._pairs:
            theirs, own = vars(module), vars(copy)
            if len(theirs["_modules"]) != len(children):
                return False
            for name, child in theirs["_modules"].items():
                if children.get(name, self) is not child:
                    return False
            for name, value in theirs.items():
                if own.get(name, self) is not value and name not in _OWN:
                    own[name] = value
        return True

    def has_state(self) -> bool:
        """Return whether the twin's forward has set attributes, which the host's module does not have."""
        return any(
            vars(module).get(name, self) is not value
            for module, copy, _ in self._pairs
            for name, value in vars(copy).items()
            if name not in _OWN
        )


def shared(kind: type[torch.nn.Module], module: torch.nn.Module) -> torch.nn.Module:
    """Return a module of another ``kind`` that has the attributes of ``module``, also those that change later."""
    other = kind.__new__(kind)
    object.__setattr__(other, "__dict__", vars(module))
    return other
