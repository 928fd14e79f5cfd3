"""Packages that import their host when it is needed: that takes seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["exported"]


def exported(module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``: the ``names`` are those of ``module``, which is imported when one is asked for."""

    def get(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(module), name)
        raise AttributeError(f"module {module.rpartition('.')[0]!r} has no attribute {name!r}")

    return get
