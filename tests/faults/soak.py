"""Long runs: memory, threads, file handles and time per step stay flat, and replicas' masks stay equal.

    python tests/faults/soak.py --hosts deepspeed megatron torch --steps 20000

Two stages, two replicas. Plans are made anew now and then (their times are put wrong), the model is evaluated between,
the run is saved and loaded. Then the host alone, for a quarter of the steps. The slopes are least squares over the last
three quarters of a run, with their standard errors; results/soak.json beside the benchmarks keeps them, and
docs/reliability.md shows them.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import hosts
import torch.distributed as dist
from measuring import machine, put_table, resident
from rank_pools import rank_pool

from tf_adapters.schedule.durations import Bounds

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "soak.json"
PAGE = ROOT / "docs" / "reliability.md"
NAMES = {"deepspeed": "DeepSpeed", "megatron": "Megatron-Core", "torch": "torch.distributed.pipelining"}
RANKS = 4
LOOKS = 80
SETTINGS = {
    **{"warmup_steps": 4, "monitoring_steps": 20, "progressive_steps": 10, "replan_interval": 50, "report_every": 100},
    "on_error": "warn",
}
DEFERS = ("deepspeed", "megatron")  # DistributedDataParallel around torch's stages cannot
FIGURES = {"resident_mib": "MiB", "threads": "", "files": "", "step_ms": "ms"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--steps", type=int, default=20_000)
    args = parser.parse_args()
    for host in args.hosts:
        section = {**SETTINGS, "weight_gradients": "deferred" if host in DEFERS else "in_place"}
        each = args.steps // LOOKS
        row = {
            "steps": args.steps,
            **run(host, section, args.steps, each),
            "alone": run(host, None, args.steps // 4, each),
        }
        keep(host, row)
        print(host, json.dumps({"slopes": row["slopes"], "alone": row["alone"]["slopes"]}, indent=1), flush=True)
    put_table(PAGE, "soak", table(json.loads(RESULTS.read_text())["hosts"]))


def run(host: str, section: dict[str, Any] | None, steps: int, each: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = rank_pool(host, RANKS).run(train, host, section, steps, each, folder, timeout_s=7200.0)
    looks, plans = of_ranks[0]
    slopes = {name: slope([look[name] for look in looks], each) for name in FIGURES}
    return {"plans": plans, "slopes": slopes, "looks": looks}


def train(host: str, section: Any, steps: int, each: int, folder: str) -> tuple[list[dict[str, float]], int]:
    """How this process is after ``each`` steps, look by look, and how many plans there were. Called on all ranks."""
    training = hosts.start(host, section, folder)
    looks, plans, newest, times = [], 0, None, []
    for number in range(steps):
        began = time.perf_counter()
        training.step(number % 1000)
        times.append(1e3 * (time.perf_counter() - began))
        if section is not None:
            state = training.controller.state
            assert state.failure is None, state.failure
            plans, newest = plans + (state.plan is not newest), state.plan
            if number % 500 == 250 and training.controller.phase.value == "stable":
                state.bounds = {a: Bounds(b.lower / 3, b.upper / 3) for a, b in state.bounds.items()}
        if (number + 1) % each == 0:
            between(training, folder, load=len(looks) % 4 == 3)
            looks.append(look(times))
            times = []
    if section is not None:
        training.detach()
    return looks, plans


def between(training: Any, folder: str, load: bool) -> None:
    """Evaluation, a checkpoint, now and then going on from it; then all ranks' masks are held against each other."""
    training.full_gradients(7)
    training.save(f"{folder}/saved")
    dist.barrier()
    if load:
        training.load(f"{folder}/saved")
    controller = training.controller
    if controller is not None:
        everywhere = [(stage, m) for stage in range(hosts.STAGES) for m in range(hosts.MICROBATCHES)]
        masks = [controller.frozen_parameters(controller.step, *at) for at in everywhere]
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, hashlib.sha256(repr((masks, controller.step)).encode()).hexdigest())
        assert len(set(digests)) == 1, f"masks differ between ranks at step {controller.step}"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/saved")
    dist.barrier()


def look(times: list[float]) -> dict[str, float]:
    gc.collect()
    return {
        "resident_mib": resident("VmRSS") / 2**20,
        "threads": float(len(os.listdir("/proc/self/task"))),
        "files": float(len(os.listdir("/proc/self/fd"))),
        "step_ms": statistics.median(times),
    }


def slope(values: list[float], steps: float) -> dict[str, float]:
    """By 1,000 steps, over the last three quarters, with its standard error; and the mean."""
    values = values[len(values) // 4 :]
    at = [steps * number / 1000.0 for number in range(len(values))]
    middle, mean = statistics.fmean(at), statistics.fmean(values)
    spread = sum((x - middle) ** 2 for x in at)
    by_step = sum((x - middle) * (y - mean) for x, y in zip(at, values, strict=True)) / spread
    left = sum((y - mean - by_step * (x - middle)) ** 2 for x, y in zip(at, values, strict=True))
    return {"mean": mean, "slope": by_step, "error": math.sqrt(left / (len(values) - 2) / spread)}


def keep(host: str, row: dict[str, Any]) -> None:
    rows = json.loads(RESULTS.read_text())["hosts"] if RESULTS.exists() else {}
    rows = {name: {**rows, host: row}[name] for name in NAMES if name in {**rows, host: row}}
    RESULTS.write_text(json.dumps({"machine": machine("deepspeed", "megatron-core"), "hosts": rows}, indent=1) + "\n")


def table(rows: dict[str, Any]) -> str:
    heads = ["host", "steps", "plans", "resident memory", "threads", "file handles", "median step"]
    lines = [heads, ["---"] * len(heads)]
    for host, row in rows.items():
        alone = row["alone"]
        lines.append([NAMES[host], f"{row['steps']:,}", str(row["plans"]), *cells(row["slopes"])])
        lines.append(["the host alone", f"{row['steps'] // 4:,}", "", *cells(alone["slopes"])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(slopes: dict[str, Any]) -> list[str]:
    texts = []
    for name, unit in FIGURES.items():
        of = slopes[name]
        texts.append(f"{of['mean']:.1f} {unit}, {of['slope']:+.3f} ± {of['error']:.3f}".replace(" ,", ","))
    return texts


if __name__ == "__main__":
    main()
