"""Shared by benchmarks: the machine, aligned rows, peak memory."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import Step

MEASURED_STEPS = 3
# Large tensors in mappings of their own, so that resident memory follows what is allocated.
PRECISE_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def aligned(cells: Sequence[str], headings: Sequence[str]) -> str:
    """A row of a table under its headings."""
    return "  ".join(cell.rjust(len(title)) for cell, title in zip(cells, headings, strict=True))


def machine(*packages: str) -> dict[str, Any]:
    """Where the figures come from: processor, Python, and the versions of torch and of packages."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        **{package: metadata.version(package) for package in ("torch", *packages)},
        "python": platform.python_version(),
    }


def keep_freed_memory() -> None:
    """In this process, as the allocators of GPUs do: glibc returns large blocks, and new pages cost more than a tap."""
    trim_threshold, mmap_max = -1, -4  # malloc.h
    malloc = ctypes.CDLL(None)
    malloc.mallopt(trim_threshold, 2**31 - 1)
    malloc.mallopt(mmap_max, 0)


def peak_memory(stages: int, setup: Callable[[], None], of_rank: Callable[..., int], *args: Any) -> list[int]:
    """``of_rank(*args)`` on each rank of a fresh pool, bytes, under an allocator that gives memory back."""
    os.environ.update(PRECISE_MALLOC)
    try:
        with RankPool(stages, setup) as ranks:
            return ranks.run(of_rank, *args, timeout_s=600)
    finally:
        for name in PRECISE_MALLOC:
            del os.environ[name]


def peak_above_idle(build: Callable[[], Step], settle: int) -> int:
    """On a rank: peak bytes of a training step above the process before ``build`` made the model.

    ``settle`` steps run before those that count. Code is no part of a step's memory: import the adapter first.
    """
    from tf_adapters.planner.solve import plan_from_json

    times = {"0F0": [1, 1], "0B0": [1, 2]}  # the solver's code is loaded by solving
    plan_from_json({"ranks": [["0F0", "0B0"]], "times": times, "max_freeze_ratio": 0.5})
    idle = resident("VmRSS")
    step = build()
    for _ in range(settle):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    for _ in range(MEASURED_STEPS):
        step()
    return resident("VmHWM") - idle


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
