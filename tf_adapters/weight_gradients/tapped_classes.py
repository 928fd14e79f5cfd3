"""Put a tap into a layer's forward, without a trace of it in copies and saved files of the layer.

A tapped layer's class is replaced by a subclass of it, as torch's parametrizations and FSDP do. The subclass looks up
the tap by the layer object. A copy, a pickle or a saved file of the layer has the original class. It therefore has no
tap, and can be read where this package is not installed.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

Run = Callable[..., Any]
Interceptor = Callable[[Run, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a layer's method with its arguments and keywords, and may do more."""

_interceptors: WeakKeyDictionary[torch.nn.Module, Interceptor] = WeakKeyDictionary()


def intercept(module: torch.nn.Module, method: str, interceptor: Interceptor) -> None:
    """Replace this object's ``method`` by a call of ``interceptor`` with that method."""
    _interceptors[module] = interceptor
    original: Any = type(module)
    module.__class__ = _subclass(original, method)


def release(module: torch.nn.Module) -> None:
    """Restore the object's own class. If other code has subclassed ours since, ours only passes calls on."""
    _interceptors.pop(module, None)
    original = vars(type(module)).get("_intercepted_class")
    if original is not None:
        module.__class__ = original


@cache
def _subclass(original: Any, method: str) -> type[torch.nn.Module]:
    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = getattr(original, method).__get__(self)  # the object may have its own class again
        interceptor = _interceptors.get(self)
        return call(*args, **kwargs) if interceptor is None else interceptor(call, args, kwargs)

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        reduced: Any = original.__reduce_ex__(self, protocol)
        rebuild, arguments, *state = reduced
        if rebuild is vars(copyreg)["__newobj__"]:  # there pickle accepts only the object's own class
            rebuild, arguments = vars(copyreg)["_reconstructor"], (subclass, object, None)
        return rebuild, tuple(original if value is subclass else value for value in arguments), *state

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    members = {method: run, "__reduce_ex__": reduce, "_intercepted_class": original, **names}
    subclass: type[torch.nn.Module] = type(original.__name__, (original,), members)
    return subclass
