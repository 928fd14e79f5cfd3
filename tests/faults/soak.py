"""Long runs: memory, threads, file handles and time per step stay flat, and replicas' masks stay equal.

    python tests/faults/soak.py --hosts deepspeed megatron torch --steps 20000

Two stages, two replicas. Plans are made anew now and then (their times are put wrong), the model is evaluated between,
the run is saved and loaded. The host alone does the same for as many steps, in processes as fresh; before every look
each of the two waits for the other, so that whatever disturbs the machine disturbs both.
benchmarks/results/hosts/soak.json keeps every look, and docs/reliability.md shows the slopes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hosts
import torch.distributed as dist
from rank_pools import fork_ranks, prepare

from benchmarks.shared.files import put_table, result_file, write_json
from benchmarks.shared.measuring import machine, resident
from tf_adapters.schedule.durations import Bounds

ROOT = Path(__file__).resolve().parents[2]
RESULTS = result_file("hosts/soak.json")
PAGE = ROOT / "docs" / "reliability.md"
NAMES = {"deepspeed": "DeepSpeed", "megatron": "Megatron-Core", "torch": "torch.distributed.pipelining"}
RANKS = 4
LOOKS = 80
WAIT_S = 1500.0  # of one run for the other, below gloo's half hour
SETTINGS = {
    **{
        "max_freeze_ratio": 0.8,
        "warmup_steps": 4,
        "monitoring_steps": 20,
        "progressive_steps": 10,
        "replan_interval": 50,
    },
    "on_error": "warn",
}
DEFERS = ("deepspeed", "megatron")  # DistributedDataParallel around torch's stages cannot
FIGURES = {"allocated_mib": "MiB", "resident_mib": "MiB", "threads": "", "files": "", "step_ms": "ms"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--steps", type=int, default=20_000)
    args = parser.parse_args()
    for host in args.hosts:
        row = {"steps": args.steps, **run(host, args.steps)}
        keep(host, row)
        print(host, json.dumps(row["slopes"], indent=1), flush=True)
    put_table(PAGE, "soak", table(json.loads(RESULTS.read_text())["hosts"]))


def run(host: str, steps: int, looks_at: int = LOOKS) -> dict[str, Any]:
    """Both runs side by side: looks of rank 0, ``looks_at`` of each, their slopes, and those of what lies between."""
    section = {**SETTINGS, "weight_gradients": "deferred" if host in DEFERS else "in_place"}
    each = steps // looks_at
    sides = {"attached": section, "alone": None}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(sides)) as threads:
        pools = {side: fork_ranks(RANKS, partial(prepare, host)) for side in sides}
        try:
            for pool in pools.values():
                pool.run(os.getpid)  # its processes start in turn
            running = {
                side: threads.submit(pool.run, train, host, sides[side], steps, each, folder, side, timeout_s=20_000.0)
                for side, pool in pools.items()
            }
            wait(running.values(), return_when=FIRST_EXCEPTION)
        finally:
            for pool in pools.values():
                pool.close()
        (looks, plans), (alone, _) = (running[side].result()[0] for side in sides)
    slopes = {"attached": slopes_of(looks, each), "alone": slopes_of(alone, each)}
    slopes["between"] = slopes_of([between(*pair) for pair in zip(looks, alone, strict=True)], each)
    return {"plans": plans, "slopes": slopes, "looks": looks, "alone": alone}


def train(host: str, section: Any, steps: int, each: int, folder: str, side: str) -> tuple[list[dict[str, float]], int]:
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
            if number % 250 == 125 and training.controller.phase.value == "stable":
                thirds = {a: Bounds(b.lower / 3, b.upper / 3) for a, b in state.measurement.times.items()}
                state.measurement = replace(state.measurement, times=thirds)
        if (number + 1) % each == 0:
            pause(training, f"{folder}/{side}", load=len(looks) % 4 == 3)
            looks.append(look(times))
            meet(Path(folder), side, len(looks))
            times = []
    if section is not None:
        training.detach()
    return looks, plans


def pause(training: Any, saved: str, load: bool) -> None:
    """Evaluation, a checkpoint, now and then going on from it; then all ranks' masks are held against each other."""
    training.full_gradients(7)
    training.save(saved)
    dist.barrier()
    if load:
        training.load(saved)
    controller = training.controller
    if controller is not None:
        everywhere = [(stage, m) for stage in range(hosts.STAGES) for m in range(hosts.MICROBATCHES)]
        masks = [controller.frozen_parameters(controller.step, *at) for at in everywhere]
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, hashlib.sha256(repr((masks, controller.step)).encode()).hexdigest())
        assert len(set(digests)) == 1, f"masks differ between ranks at step {controller.step}"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(saved)
    dist.barrier()


def meet(folder: Path, side: str, number: int) -> None:
    """Wait until the other run has come to this look. Called on all ranks."""
    if dist.get_rank() == 0:
        (folder / f"{side}.{number}").touch()
        other = folder / f"{'alone' if side == 'attached' else 'attached'}.{number}"
        until = time.monotonic() + WAIT_S
        while not other.exists():
            assert time.monotonic() < until, f"the other run has not come to look {number}"
            time.sleep(0.05)
    dist.barrier()


def look(times: list[float]) -> dict[str, float]:
    """This process, once it has given free memory back to the system: what stays free between allocations is no leak.

    Resident are anonymous pages only: those of code count from when they are first run.
    """
    gc.collect()
    LIBC.malloc_trim(0)
    return {
        "allocated_mib": allocated() / 2**20,
        "resident_mib": resident("RssAnon") / 2**20,
        "threads": float(len(os.listdir("/proc/self/task"))),
        "files": float(len(os.listdir("/proc/self/fd"))),
        "step_ms": statistics.median(times),
    }


class MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: bytes, over all of its arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


LIBC = ctypes.CDLL("libc.so.6")
LIBC.mallinfo2.restype = MallocInfo


def allocated() -> int:
    """Bytes in use: of malloc, which tensors and large objects come from, and of Python's own small objects."""
    info = LIBC.mallinfo2()
    with tempfile.TemporaryFile() as file:  # Python says it on stderr only
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        sys._debugmallocstats()
        os.dup2(stderr, 2)
        os.close(stderr)
        file.seek(0)
        found = re.search(r"^# bytes in allocated blocks += +([\d,]+)$", file.read().decode(), re.MULTILINE)
    assert found is not None, "sys._debugmallocstats() has another form"
    return int(info.uordblks) + int(info.hblkhd) + int(found[1].replace(",", ""))


def between(attached: dict[str, float], alone: dict[str, float]) -> dict[str, float]:
    """What a look at the attached run has more than one at the host alone; of step times, how many times as much."""
    more = {name: attached[name] - alone[name] for name in FIGURES}
    return {**more, "step_ms": attached["step_ms"] / alone["step_ms"]}


def slopes_of(looks: list[dict[str, float]], each: int) -> dict[str, dict[str, float]]:
    return {name: slope([look[name] for look in looks], each) for name in FIGURES}


def slope(values: list[float], steps: float) -> dict[str, float]:
    """By 1,000 steps, over the last three quarters, by least squares; its standard error; and the mean.

    Neighbouring looks are alike, so they tell less than as many independent ones: the error is that of residuals with
    the correlation that neighbours have.
    """
    values = values[len(values) // 4 :]
    at = [steps * number / 1000.0 for number in range(len(values))]
    middle, mean = statistics.fmean(at), statistics.fmean(values)
    spread = sum((x - middle) ** 2 for x in at)
    by_step = sum((x - middle) * (y - mean) for x, y in zip(at, values, strict=True)) / spread
    left = [y - mean - by_step * (x - middle) for x, y in zip(at, values, strict=True)]
    squares = sum(residual**2 for residual in left)
    alike = sum(a * b for a, b in pairwise(left)) / squares if squares else 0.0
    alike = min(max(alike, 0.0), 0.99)
    error = math.sqrt(squares / (len(values) - 2) / spread * (1.0 + alike) / (1.0 - alike))
    return {"mean": mean, "slope": by_step, "error": error}


def keep(host: str, row: dict[str, Any]) -> None:
    rows = json.loads(RESULTS.read_text())["hosts"] if RESULTS.exists() else {}
    rows = {name: {**rows, host: row}[name] for name in NAMES if name in {**rows, host: row}}
    write_json(RESULTS, {"machine": machine("deepspeed", "megatron-core"), "hosts": rows})


def table(rows: dict[str, Any]) -> str:
    heads = ["host", "steps", "plans", "memory in use", "resident memory", "threads", "file handles", "median step"]
    lines = [heads, ["---"] * len(heads)]
    for host, row in rows.items():
        slopes, steps = row["slopes"], f"{row['steps']:,}"
        lines.append([NAMES[host], steps, str(row["plans"]), *cells(slopes["attached"], FIGURES)])
        lines.append(["the host alone", steps, "", *cells(slopes["alone"], FIGURES)])
        lines.append(["between them", "", "", *cells(slopes["between"], {**FIGURES, "step_ms": "times"})])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(slopes: dict[str, Any], units: dict[str, str]) -> list[str]:
    texts = []
    for name, unit in units.items():
        of, digits = slopes[name], 3 if unit == "times" else 1
        texts.append(f"{of['mean']:.{digits}f} {unit}, {of['slope']:+.3f} ± {of['error']:.3f}".replace(" ,", ","))
    return texts


if __name__ == "__main__":
    main()
