"""Speed with deferred weight gradients where ranks need not meet between steps, on every host, on emulated devices.

Equal stages, 1F1B, no gradient clipping; then with clipping, on DeepSpeed with ZeRO 1, where ranks meet for the norm.
Nothing else in the loop of the benchmark makes ranks meet: losses are read at the end. Every operation sleeps as long
as a slow device would compute: order, communication and waiting are the engine's own, durations are emulated, and no
figure says anything about a GPU.

Writes results/hosts/overlapping.json, host by host, and the table into docs/deferral.md.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from typing import Any

import torch.distributed as dist

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import HOSTS, Size, Training, setup, start
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.paired import PairedSettings

RESULTS = result_file("hosts/overlapping.json")
PAGE = ROOT / "docs" / "deferral.md"
RATES = {"deepspeed": 3e9, "megatron-core": 1e9, "torch": 1e9}
"""FLOP/s, at which a forward of a stage takes about 60 ms. DeepSpeed's microbatches have more rows."""
CLIPPED = ", clipped"
"""The end of the names of rows with clipping."""
WIDE = "8 x 16"
SIZES = {"4 x 8": (4, 8), WIDE: (8, 16)}
"""Pipeline ranks and microbatches."""
PHASES = {"warmup": 2, "monitoring": 10, "progressive": 0, "stable": 40}
MAX_NORM = {"deepspeed": 7.0, "megatron-core": 6.0, "torch": 3.0}
"""The norm by which gradients are clipped. It clips a few steps."""
SETTLE = 4
"""Steps after a change that do not count."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help=f"{WIDE} only runs on torch")
    args = parser.parse_args()
    for size in args.sizes:
        for host in args.hosts:
            if size != WIDE or host == "torch":
                keep(f"{size}, {host}", measure(host, *SIZES[size]))
            if size != WIDE:
                keep(f"{size}, {host}{CLIPPED}", measure(host, *SIZES[size], max_norm=MAX_NORM[host]))
    text = table(read_rows())
    put_table(PAGE, "overlapping", text)
    print(text)


def keep(name: str, row: dict[str, Any]) -> None:
    """Replace the figures of a host at one size, and where they come from."""
    emulation = {"device": "emulated", "rates": RATES}
    order = [f"{size}, {host}{way}" for size in SIZES for host in HOSTS for way in ("", CLIPPED)]
    keep_row(RESULTS, "rows", {name: {**row, "machine": machine(*HOSTS)}}, order, **emulation)


def read_rows() -> dict[str, Any]:
    """The figures that have been measured, by size and host."""
    return read_part(RESULTS, "rows")


def measure(host: str, ranks: int, microbatches: int, max_norm: float = 0.0) -> dict[str, Any]:
    """The host alone, and with deferred weight gradients at three amounts of memory.

    With a ``max_norm`` above 0 gradients are clipped.
    """
    size = Size(
        ranks,
        layers=2 * ranks,
        width=192,
        context=16,
        micro_batch=2,
        microbatches=microbatches,
        clip=max_norm,
    )
    row: dict[str, Any] = {"clip": size.clip}
    with RankPool(ranks, functools.partial(setup, host)) as pool:
        alone = row["alone"] = _of_all(pool.run(run_alone, host, size, timeout_s=1200))
        for extra in (0, ranks // 2, ranks):
            exact = row[str(extra)] = _of_all(pool.run(run_exact, host, size, extra, timeout_s=1200))
            exact["speedup"] = alone["step_ms"] / exact["step_ms"]
            exact["measured_over_planned"] = exact["step_ms"] / exact["planned_ms"]
            exact["same_losses"] = exact["losses"] == alone["losses"]
            print(host, extra, {name: value for name, value in exact.items() if name != "losses"}, flush=True)
    return row


def _of_all(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What one rank says for all, with the losses of a rank that has them."""
    return {**ranks[0], "losses": next(rank["losses"] for rank in ranks if None not in rank["losses"])}


def run_alone(host: str, size: Size) -> dict[str, Any]:
    """The host's step in ms, its losses, and how far the emulation was off. Called on all ranks at once."""
    with EmulatedDevice(RATES[host], real_time=True) as device:
        begins, losses = train(start(host, PairedSettings(), alone=True, size=size), sum(PHASES.values()))
        return {"step_ms": step_ms(begins[SETTLE:]), "losses": losses, "emulation_error": device.error}


def run_exact(host: str, size: Size, extra_microbatches: int) -> dict[str, Any]:
    """The step in stable freezing beside the plan's, and the losses of all steps. Called on all ranks at once."""
    section = {
        "weight_gradients": "deferred",
        "max_freeze_ratio": 0.0,
        "extra_microbatches": extra_microbatches,
        "monitoring_precision": 0.02,
        "replan_threshold": 0.0,
    }
    freezing = PairedSettings(**PHASES, output_dir=f"runs/bench/overlapping/{host}", settings=section)
    with EmulatedDevice(RATES[host], real_time=True) as device:
        training = start(host, freezing, size=size)
        controller = training.adapter.controller
        begins, losses = train(training, freezing.steps)
        settled = controller.state.phases.progressive_end + SETTLE
        forecast, measurement = controller.forecast, controller.state.measurement
        training.detach()
    return {
        "step_ms": step_ms(begins[settled:]),
        "planned_ms": forecast.planned_ms,
        "planned_speedup": forecast.unfrozen_ms / forecast.planned_ms,
        "steps": measurement.steps,
        "losses": losses,
        "emulation_error": device.error,
    }


def train(training: Training, steps: int) -> tuple[list[float], list[float | None]]:
    """When each step began on this rank, in s, and the losses of the steps, None on ranks that have none."""
    begins, losses = [], []
    for _ in range(steps):
        begins.append(time.perf_counter())
        losses.append(training.step())
    return begins, [None if loss is None else float(loss) for loss in losses]


def step_ms(begins: list[float]) -> float:
    """The median time from step to step, of the rank where it is longest. Called on all ranks at once."""
    own = statistics.median(1e3 * (after - before) for before, after in itertools.pairwise(begins))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return max(every)


def mean_step_ms(begins: list[float]) -> float:
    """The mean time from step to step, of the rank where it is longest. Called on all ranks at once."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, 1e3 * (begins[-1] - begins[0]) / (len(begins) - 1))
    return max(every)


def table(rows: dict[str, Any]) -> str:
    """One line for each size and host, one column for each amount of memory."""
    lines = []
    for name, row in rows.items():
        size, host, *way = name.split(", ")
        words = HOSTS[host] + (CLIPPED if way else "")
        lines.append([size, words, *(cell(row[extra]) for extra in row if extra.isdigit())])
    head = ["stages x microbatches", "host", "the host's memory", "1.5 times the memory", "twice the memory"]
    return markdown_table(head, lines)


def cell(of: dict[str, Any]) -> str:
    same = "same losses" if of["same_losses"] else "**other losses**"
    meet = ", ranks meet" if of["steps"] == "meet" else ""
    return f"{of['speedup']:.3f}x, {of['measured_over_planned']:.3f} of the planned step, {same}{meet}"


if __name__ == "__main__":
    main()
