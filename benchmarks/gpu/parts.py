"""Shared by the parts of the acceptance on GPUs: options, reasons to skip, checks, how ranks join."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.one_gpu_group import BACKEND, join_one_gpu
from benchmarks.shared.files import ROOT

PICTURES = ROOT / "docs" / "images"
WAYS: dict[str, dict[str, Any]] = {
    "tensors": {},
    "deferred": {"weight_gradients": "deferred"},
    "tokens": {"granularity": "token"},
}
"""Settings by name: the granularity of skipping, and deferral."""

NOT_RUN = ": not run"
"""End of a check's name for a case that did not run. The check's note has the reason."""


class Skipped(Exception):
    """Raised if a part cannot run here. The message is the reason."""


@dataclass(frozen=True)
class Options:
    """Where the parts run: ``device`` is "cuda" or "cpu". ``tiny`` sizes test only the script.

    ``no_mps`` is the reason why processes cannot compute side by side on one GPU; "" if they can.
    """

    device: str = "cuda"
    tiny: bool = False
    folder: str = "runs/gpu"
    no_mps: str = ""

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def judged(self) -> bool:
        """True if time and memory are compared with their limits: on a GPU, at full size."""
        return self.cuda and not self.tiny

    def target(self) -> torch.device:
        """This rank's device."""
        return torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")


@dataclass(frozen=True)
class Check:
    """A figure, and what it must not exceed (``most``) or fall below (``least``); with neither it is only shown."""

    name: str
    value: float
    unit: str = ""
    most: float | None = None
    least: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """None if the figure has no limit. A NaN fails."""
        if self.most is None and self.least is None:
            return None
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)


@dataclass(frozen=True)
class Part:
    """One part of the acceptance.

    Attributes:
        title: one line that says what it checks.
        run: called on all ranks at once. It yields checks, and those of rank 0 count. It may raise Skipped.
        missing: returns the reason why it cannot run with these options; None if it can.
        ranks: returns the number of processes that run it.
        backend: the process group's backend on a GPU.
        minutes: its time limit. The checks that it has yielded until then stay.
        shares: whether its ranks share one GPU.
    """

    title: str
    run: Callable[[Options], Iterable[Check]]
    missing: Callable[[Options], str | None]
    ranks: Callable[[Options], int] = field(default=lambda options: 1)
    backend: str = "cpu:gloo,cuda:nccl"
    minutes: float = 10.0
    shares: bool = False


def no_gpu(options: Options) -> str | None:
    """Return the reason why nothing can run on the chosen device; None if it can."""
    if options.cuda and not torch.cuda.is_available():
        return "no CUDA device"
    return None


def no_package(options: Options, *packages: str) -> str | None:
    """Return the first thing that is missing: the device, or one of these packages. None if nothing is."""
    missing = (f"{name} is not installed" for name in packages if importlib.util.find_spec(name) is None)
    return no_gpu(options) or next(missing, None)


def join(options: Options, backend: str) -> None:
    """Join the ranks of a pool. Ranks share a GPU only if there are fewer GPUs than ranks."""
    logging.getLogger("tf_adapters").setLevel(logging.WARNING)
    if options.cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if backend == BACKEND:
        join_one_gpu()
    elif options.cuda:
        dist.init_process_group(backend)


def section(options: Options, **settings: Any) -> dict[str, Any]:
    """Settings of a run whose plan is given: no replanning, errors are raised."""
    fixed: dict[str, Any] = {"output_dir": options.folder, "on_error": "raise", "replan_threshold": 0.0}
    if "goal" not in settings:
        fixed["max_freeze_ratio"] = 0.8
    return {**fixed, **settings}
