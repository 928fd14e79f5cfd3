"""What freezing gains and costs on DeepSpeed's pipeline engine: `make bench`.

Two stages on this machine's CPU, one thread each. Times are ratios of steps that ran in turn in the same
processes; memory is the peak above an idle process, in processes of its own. Writes JSON beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "deepspeed_gpt"))

import paired

from tf_adapters.testing import RankPool

MEASURED_STEPS = 3
NOT_FREEZING_PAIRS = 60
# Large tensors in mappings of their own, so that resident memory follows what is allocated.
PRECISE_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Result:
    """Ratios to DeepSpeed alone, shares of a step, and bytes by pipeline rank."""

    config: str
    not_freezing_step_ratio: float | None  # None where the host alone runs another schedule
    stable_step_ratio: float
    planned_step_ratio: float
    masks_share_of_step: float
    step_ms_alone: float
    held_out_loss_alone: float
    held_out_loss_freezing: float
    peak_bytes: dict[str, list[int]]

    def lines(self) -> list[str]:
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


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main() -> None:
    args = parse_args()
    for config in args.configs:
        options = paired.Options(
            config=config,
            warmup=args.warmup,
            monitoring=args.monitoring,
            progressive=10,
            stable=args.stable,
            max_freeze_ratio=args.max_freeze_ratio,
            output_dir=f"runs/bench/{config}",
        )
        result = measure(options)
        print(f"\n{config}: {machine()}", *result.lines(), sep="\n", flush=True)
        target = Path(__file__).with_name("results") / f"deepspeed_speed_{config}.json"
        target.parent.mkdir(exist_ok=True)
        record = {"machine": machine(), "options": asdict(options), "result": asdict(result)}
        target.write_text(json.dumps(record, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=["plain", "gpipe"], help="names in deepspeed_configs/")
    parser.add_argument("--max-freeze-ratio", type=float, default=0.8)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--monitoring", type=int, default=60)
    parser.add_argument("--stable", type=int, default=40, help="pairs of steps in stable freezing")
    return parser.parse_args()


def measure(options: paired.Options) -> Result:
    with RankPool(options.stages, paired.setup) as ranks:
        outcome = ranks.run(paired.run, options, timeout_s=3600)[0]
        not_freezing = None
        if "schedule" not in options.ds_config()["timely_freeze"]:
            attached = replace(options, warmup=NOT_FREEZING_PAIRS)
            not_freezing = ranks.run(paired.run_without_freezing, attached, timeout_s=3600)[0].ratio("warmup")
    frozen_ms = statistics.median(outcome.pairs.attached["stable"])
    return Result(
        config=options.config,
        not_freezing_step_ratio=not_freezing,
        stable_step_ratio=outcome.pairs.ratio("stable"),
        planned_step_ratio=outcome.planned_ratio,
        masks_share_of_step=outcome.mask_ms / frozen_ms,
        step_ms_alone=statistics.median(outcome.pairs.alone["stable"]),
        held_out_loss_alone=outcome.held_out_alone,
        held_out_loss_freezing=outcome.held_out_attached,
        peak_bytes={mode: peak_memory(options, mode) for mode in ("alone", "attached", "freezing")},
    )


def peak_memory(options: paired.Options, mode: str) -> list[int]:
    """Peak bytes of a training step by pipeline rank, above the process before it built the model."""
    os.environ.update(PRECISE_MALLOC)
    try:
        with RankPool(options.stages, paired.setup) as ranks:
            return ranks.run(peak_of_rank, options, mode, timeout_s=600)
    finally:
        for name in PRECISE_MALLOC:
            del os.environ[name]


def peak_of_rank(options: paired.Options, mode: str) -> int:
    import tf_adapters.deepspeed.adapter  # noqa: F401
    from tf_adapters.planner import plan_from_json

    # Code is no part of a step's memory: load it first, the solver's by solving.
    times = {"0F0": [1, 1], "0B0": [1, 2]}
    plan_from_json({"ranks": [["0F0", "0B0"]], "times": times, "max_freeze_ratio": 0.5})
    idle = resident("VmRSS")
    short = replace(
        options,
        warmup=3 if mode == "freezing" else 100,
        monitoring=6,
        progressive=0,
        output_dir=f"{options.output_dir}/memory",
    )
    engine = paired.build_engine(short, freezing=mode != "alone")[0]
    data = paired.training_data(engine, short)
    for _ in range(short.monitoring + 6):
        engine.train_batch(data)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    for _ in range(MEASURED_STEPS):
        engine.train_batch(data)
    return resident("VmHWM") - idle


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def machine() -> dict[str, Any]:
    import deepspeed
    import torch

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
