"""Import a host only when a name of its package is used, since the import takes seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def exported(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a ``package`` that imports a name's module (``modules``) at first use."""

    def get(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
