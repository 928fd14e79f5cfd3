"""Change modules of a host when they are imported, so that they run on a machine without what they need."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Change", "ChangedImports", "Run"]

Run = Callable[[types.ModuleType], None]
"""Runs a module's own code."""

Change = Callable[[Run, types.ModuleType], None]
"""Calls ``Run`` with the module, and changes what it needs before or after."""


class ChangedImports(importlib.abc.MetaPathFinder):
    """A finder for ``sys.meta_path``. ``change_of`` maps a module's full name to its change; None leaves it alone."""

    def __init__(self, change_of: Callable[[str], Change | None]) -> None:
        self._change_of = change_of

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        change = self._change_of(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if change is not None else None
        if change is not None and spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            vars(spec.loader)["exec_module"] = lambda module: change(run, module)
        return spec
