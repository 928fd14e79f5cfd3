"""Run an unedited TorchTitan job where there is no GPU, to try a command line out before it costs anything::

    torchrun --nproc-per-node 2 -m tf_adapters.testing.torchtitan_on_cpu -m tf_adapters.torchtitan ...
    torchrun --nproc-per-node 2 -m tf_adapters.testing.torchtitan_on_cpu -m torchtitan.train ...

TorchTitan takes the accelerator that torch finds, and "cuda" where there is none: here it is the CPU, over gloo. Its
figures of device memory are 0, and what is written for Triton can be imported, not run.
Seen to run: TorchTitan 0.2.2 (torch 2.13).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch._utils

_USAGE = "usage: torchrun [...] -m tf_adapters.testing.torchtitan_on_cpu -m MODULE [its arguments]"


def install() -> None:
    """Prepare this process for TorchTitan, before it is imported."""
    vars(torch._utils)["_get_available_device_type"] = lambda: "cpu"
    of_a_device: dict[str, Any] = {
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=_memory_bytes()),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, function in of_a_device.items():
        vars(torch.cpu).setdefault(name, function)
    barrier = torch.distributed.barrier
    vars(torch.distributed)["barrier"] = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _WithTriton())


class _WithTriton(importlib.abc.MetaPathFinder):
    """Imports the module of TorchTitan that defines kernels with a stand-in for Triton, which nobody else sees."""

    _module = "torchtitan.models.moe.kernels"

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module
        vars(spec.loader)["exec_module"] = lambda module: _with_triton(run, module)
        return spec


def _with_triton(run: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    language = types.ModuleType("triton.language")
    vars(language)["constexpr"] = int
    triton = types.ModuleType("triton")
    vars(triton).update(jit=lambda function: function, language=language)
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        run(module)
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def main() -> None:
    """Run the module that the arguments name, as ``__main__``."""
    if sys.argv[1:2] != ["-m"] or len(sys.argv) < 3:
        raise SystemExit(_USAGE)
    install()
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
