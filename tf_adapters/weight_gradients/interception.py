"""Call a function of ours around a method of some modules, without a change of the modules.

The class gets a method that looks up the module it is called on. A module that is not intercepted runs the class's own
method. So a module keeps its class, and a copy or a saved file of it has no trace of ours. The class gets its own
method back when the interception of its last module is removed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from threading import RLock
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch

Run = Callable[..., Any]
Interceptor = Callable[[Run, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a module's method with its arguments and keywords, and may do more."""

_Place = tuple[Any, str]
"""A class and the name of its method."""

_interceptions: WeakKeyDictionary[torch.nn.Module, Interception] = WeakKeyDictionary()
_users: Counter[_Place] = Counter()
_lock = RLock()  # a finalizer may run in the middle of this, in any thread
_replaced: dict[_Place, tuple[Any, Any]] = {}  # the class's own method, None if it is inherited; ours


class Interception:
    """From now on ``interceptor`` is called where the ``method`` of this one module would run.

    ``call`` is the method that does so. Methods of ours for base classes, and older ones, only pass calls on.
    """

    def __init__(self, module: torch.nn.Module, method: str, interceptor: Interceptor) -> None:
        self.interceptor = interceptor
        self._module, self._place = ref(module), (type(module), method)
        with _lock:
            _users[self._place] += 1  # first, so that a model that is collected now gives nothing back
            if self._place not in _replaced or vars(type(module)).get(method) is not _replaced[self._place][1]:
                _replace(self._place)  # also if other code has replaced ours since
        self._release = finalize(
            module, _release, self._place
        )  # also when the module is collected and nobody calls remove()
        self._release.atexit = False
        self.call = _replaced[self._place][1]
        _interceptions[module] = self

    def remove(self) -> None:
        """Let the module run its own method again."""
        module = self._module()
        if module is not None and _interceptions.get(module) is self:
            del _interceptions[module]
        self._release()


def _replace(place: _Place) -> None:
    owner, method = place
    run = getattr(owner, method)

    @functools.wraps(run)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled model of this process has nothing of ours in its graphs
            return run(self, *args, **kwargs)
        interception = _interceptions.get(self)
        if interception is None or interception.call is not call:  # ours of a base class, or an older one
            return run(self, *args, **kwargs)
        return interception.interceptor(MethodType(run, self), args, kwargs)

    _replaced[place] = vars(owner).get(method), call
    setattr(owner, method, call)


def _release(place: _Place) -> None:
    with _lock:
        _users[place] -= 1
        if not _users[place]:
            _restore(place)


def _restore(place: _Place) -> None:
    """Restore the class's method. If other code has replaced ours since, it stays: ours only passes calls on."""
    owner, method = place
    own, ours = _replaced.pop(place)
    if vars(owner).get(method) is not ours:
        return
    if own is None:
        delattr(owner, method)
    else:
        setattr(owner, method, own)
