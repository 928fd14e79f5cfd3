"""Parts that stand-ins for hosts share: changes of modules at their import, barriers, and the command line."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import torch

from tf_adapters.hosts.launcher import run_command

__all__ = ["AbsentTriton", "Change", "ChangedImports", "Run", "accept_device_ids", "run_prepared"]

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


class AbsentTriton(Mock):
    """Triton, or any name in it: it works in decorators and annotations. A kernel raises when it is launched."""

    __path__: list[str] = []  # noqa: RUF012 (a package without modules: to import one raises ModuleNotFoundError)
    __spec__ = None
    __version__ = "3.4.0"

    def __getitem__(self, grid: Any) -> Any:
        raise NotImplementedError(f"{self}: a Triton kernel needs Triton and a GPU")


def accept_device_ids() -> None:
    """Let ``torch.distributed.barrier`` ignore ``device_ids``: stand-ins have no numbered devices."""
    barrier = torch.distributed.barrier
    vars(torch.distributed)["barrier"] = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)


def run_prepared(install: Callable[[], None], usage: str | None) -> None:
    """Call ``install``, then run the script or ``-m module`` in the arguments; without one, print ``usage``."""
    arguments = sys.argv[1:]
    if arguments in ([], ["-m"], ["-h"], ["--help"]):
        print(usage)
        raise SystemExit(0 if arguments in (["-h"], ["--help"]) else 2)
    run_command(arguments, install)
