"""What the benchmarks of all hosts share: the figures that they report, peak memory, and the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import Freezing, Outcome, Step

_Options = TypeVar("_Options", bound=Freezing)

MODES = ("alone", "attached", "freezing")
MEASURED_STEPS = 3
# Large tensors in mappings of their own, so that resident memory follows what is allocated.
PRECISE_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Result:
    """Ratios to the host alone, shares of a step, and bytes by pipeline rank."""

    config: str
    not_freezing_step_ratio: float | None  # None where the host alone runs another schedule
    stable_step_ratio: float
    planned_step_ratio: float
    masks_share_of_step: float
    step_ms_alone: float
    held_out_loss_alone: float
    held_out_loss_freezing: float
    peak_bytes: dict[str, list[int]]

    @classmethod
    def of(cls, config: str, outcome: Outcome, not_freezing: float | None, peaks: dict[str, list[int]]) -> Result:
        return cls(
            config=config,
            not_freezing_step_ratio=not_freezing,
            stable_step_ratio=outcome.pairs.ratio("stable"),
            planned_step_ratio=outcome.planned_ratio,
            masks_share_of_step=outcome.mask_ms / statistics.median(outcome.pairs.attached["stable"]),
            step_ms_alone=statistics.median(outcome.pairs.alone["stable"]),
            held_out_loss_alone=outcome.held_out_alone,
            held_out_loss_freezing=outcome.held_out_attached,
            peak_bytes=peaks,
        )

    def lines(self) -> list[str]:
        """The figures, for people."""
        measured, planned = 1 / self.stable_step_ratio, 1 / self.planned_step_ratio
        off = self.stable_step_ratio / self.planned_step_ratio - 1
        rows = [
            ("step with freezing / alone", f"{self.stable_step_ratio:.3f}", f"{measured:.2f}x"),
            ("   as planned", f"{self.planned_step_ratio:.3f}", f"{planned:.2f}x; measured is {off:+.1%} of it"),
            ("step attached, not freezing / alone", _ratio(self.not_freezing_step_ratio), ""),
            ("masks, share of a step", f"{self.masks_share_of_step:.2%}", ""),
            (
                "held-out loss, alone / freezing",
                f"{self.held_out_loss_alone:.3f}",
                f"{self.held_out_loss_freezing:.3f}",
            ),
        ]
        for mode, peaks in self.peak_bytes.items():
            of_alone = [mine / alone for mine, alone in zip(peaks, self.peak_bytes["alone"], strict=True)]
            shown = " ".join(
                f"{peak / 2**20:.1f} MiB ({ratio:.3f})" for peak, ratio in zip(peaks, of_alone, strict=True)
            )
            rows.append((f"peak memory by rank, {mode}", shown, ""))
        return [f"{name:<40}{value:>10}  {note}" for name, value, note in rows]


def for_memory(options: _Options, mode: str) -> _Options:
    """The options of a training that is only there to show its peak memory in a mode of MODES."""
    return replace(
        options,
        warmup=3 if mode == "freezing" else 100,
        monitoring=6,
        progressive=0,
        output_dir=f"{options.output_dir}/memory",
    )


def aligned(cells: Sequence[str], headings: Sequence[str]) -> str:
    """A row of a table under its headings."""
    return "  ".join(cell.rjust(len(title)) for cell, title in zip(cells, headings, strict=True))


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def publish(name: str, host: str, options: Any, result: Result) -> None:
    """Print the figures, and keep them as results/NAME.json; ``options`` is a dataclass."""
    print(f"\n{result.config}: {machine(host)}", *result.lines(), sep="\n", flush=True)
    target = Path(__file__).with_name("results") / f"{name}.json"
    target.parent.mkdir(exist_ok=True)
    record = {"machine": machine(host), "options": asdict(options), "result": asdict(result)}
    target.write_text(json.dumps(record, indent=1) + "\n")


def machine(host: str) -> dict[str, Any]:
    """Where the figures come from; ``host`` is the package of the training framework."""
    import torch

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        host: metadata.version(host),
        "python": platform.python_version(),
    }


def peak_memory(stages: int, setup: Callable[[], None], of_rank: Callable[..., int], *args: Any) -> list[int]:
    """``of_rank(*args)`` on each rank of a fresh pool, under an allocator that gives memory back."""
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
