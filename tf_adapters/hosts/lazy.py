"""Import a host only when a name of its package is used, since the import takes seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def exported(module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__`` that takes ``names`` from ``module``, imported at first use."""

    def get(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(module), name)
        raise AttributeError(f"module {module.rpartition('.')[0]!r} has no attribute {name!r}")

    return get
