"""TimelyFreeze inside the frameworks that people train pipelines with.

``import tf_adapters`` imports neither torch nor a host. A submodule is imported when it is asked for:
``tf_adapters.deepspeed`` needs DeepSpeed, nothing else here does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tf_adapters.errors import (
    ConfigError,
    PlanInputError,
    ScheduleError,
    SolverError,
    TimelyFreezeError,
    UnsupportedError,
)

if TYPE_CHECKING:  # for a type checker, to which __getattr__ gives Any
    from tf_adapters import deepspeed as deepspeed
    from tf_adapters import megatron as megatron
    from tf_adapters import torch_pipelining as torch_pipelining
    from tf_adapters.config import TimelyFreezeConfig
    from tf_adapters.hosts.adapter import HostAdapter as Adapter

__version__ = "0.1.0"
__all__ = [
    "Adapter",
    "ConfigError",
    "PlanInputError",
    "ScheduleError",
    "SolverError",
    "TimelyFreezeConfig",
    "TimelyFreezeError",
    "UnsupportedError",
    "__version__",
]
_IMPORTED_LATE = {
    "Adapter": ("tf_adapters.hosts.adapter", "HostAdapter"),
    "TimelyFreezeConfig": ("tf_adapters.config", "TimelyFreezeConfig"),
}


def __getattr__(name: str) -> Any:
    if name in _IMPORTED_LATE:
        module, attribute = _IMPORTED_LATE[name]
        return getattr(importlib.import_module(module), attribute)
    path = f"{__name__}.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # a submodule of ours that misses a package
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
