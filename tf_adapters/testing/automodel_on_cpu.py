"""Run an unedited NeMo AutoModel job without a GPU, to try a command line before a real run::

    torchrun --nproc-per-node 2 -m tf_adapters.testing.automodel_on_cpu -m nemo_automodel.cli.app job.yaml

The job needs ``dist_env.backend: gloo``. AutoModel builds its models on "cuda", which here is the CPU. Figures of
device memory are 0. Run with nemo-automodel 0.7.0 (torch 2.13).
"""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import torch

from tf_adapters.testing.after_import import ChangedImports, Run, accept_device_ids, run_prepared

_ON_CUDA = re.compile(
    r"nemo_automodel\.(_transformers\.auto_model|recipes\.llm\.train_ft|components\.models\.\w+\.model)"
)
"""Modules that build tensors on a device of type "cuda" by name."""


class _OnCpu:
    """The torch module with the CPU as every device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*args: Any) -> torch.device:
        return torch.device("cpu")


def install() -> None:
    """Prepare this process for AutoModel, before it is imported."""
    of_a_device: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "synchronize": lambda device=None: None,
    }
    vars(torch.cuda).update(of_a_device)
    accept_device_ids()
    sys.meta_path.insert(0, ChangedImports(lambda name: _on_cpu if _ON_CUDA.fullmatch(name) else None))


def _on_cpu(run: Run, module: types.ModuleType) -> None:
    run(module)
    vars(module)["torch"] = _OnCpu()


if __name__ == "__main__":
    run_prepared(install, __doc__)
