"""Speed of each goal on every host, on emulated devices: what an empty section and a bare ``--timely-freeze`` bring.

Four emulated devices run the hosts' real engines: 1F1B, 8 microbatches, equal stages, nothing that makes ranks meet.
Every operation sleeps as long as a slow device would compute, so no figure says anything about a GPU.

Writes results/hosts/goals.json, host by host, and the table into docs/when.md.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from benchmarks.hosts.overlapping import RATES, SETTLE, mean_step_ms, train
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import HOSTS, Size, setup, start
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.paired import PairedSettings

RESULTS = result_file("hosts/goals.json")
PAGE = ROOT / "docs" / "when.md"
ALONE = "host alone"
EMPTY = "an empty section"
WAYS: dict[str, dict[str, Any]] = {
    EMPTY: {},
    "exact": {"goal": "exact"},
    "exact, extra_microbatches 4": {"goal": "exact", "extra_microbatches": 4},
    "paper": {"goal": "paper"},
}
SPEED_LASTS_MS = 60.0
"""How long a device keeps a speed that was drawn: the time of a forward."""
SIZE = Size(4, layers=8, width=192, context=16, micro_batch=2, microbatches=8, clip=0.0)
PHASES = {"warmup": 2, "monitoring": 12, "progressive": 0, "stable": 22}
SHOWN = (EMPTY, "exact, extra_microbatches 4", "paper")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    for host in [] if args.table else args.hosts:
        with RankPool(SIZE.ranks, functools.partial(setup, host)) as pool:
            row = {way: pool.run(run, host, way, timeout_s=1200)[0] for way in (ALONE, *SHOWN)}
        print(host, {way: of["step_ms"] for way, of in row.items()}, flush=True)
        keep_row(RESULTS, "rows", {host: {**row, "machine": machine(host)}}, HOSTS, device="emulated", rates=RATES)
    text = table(read_rows())
    put_table(PAGE, "goals", text)
    print(text)


def read_rows() -> dict[str, Any]:
    """The figures that have been measured, by host."""
    return read_part(RESULTS, "rows")


def run(
    host: str, way: str, jitter: float = 0.0, *, links: AbstractContextManager[Any] | None = None
) -> dict[str, Any]:
    """The mean step in stable freezing beside the plan's. Called on all ranks at once."""
    settings = {"monitoring_precision": 0.02, "replan_threshold": 0.0, **WAYS.get(way, {})}
    freezing = PairedSettings(**PHASES, max_freeze_ratio=None, output_dir=f"runs/bench/goals/{host}", settings=settings)
    seed = dist.get_rank()
    device = EmulatedDevice(RATES[host], jitter=jitter, jitter_ms=SPEED_LASTS_MS, seed=seed, real_time=True)
    with device, links or nullcontext():
        training = start(host, freezing, alone=way == ALONE, size=SIZE)
        begins, _ = train(training, freezing.steps)
        if way == ALONE:
            return {"step_ms": mean_step_ms(begins[SETTLE:]), "emulation_error": device.error}
        controller = training.adapter.controller
        settled = controller.state.phases.progressive_end + SETTLE
        forecast, state = controller.forecast, controller.state
        training.detach()
        return {
            "step_ms": mean_step_ms(begins[settled:]),
            "planned_ms": forecast.planned_ms,
            "frozen": state.plan.mean_freeze_ratio,
            "steps": state.measurement.steps,
            "emulation_error": device.error,
        }


def table(rows: dict[str, Any]) -> str:
    """One line for each host, one column for each goal."""
    lines = [[HOSTS[host], *(cell(row, way) for way in SHOWN)] for host, row in rows.items()]
    return markdown_table(["", *SHOWN], lines)


def cell(row: dict[str, Any], way: str) -> str:
    """The speed over the host alone, and the step over the plan's."""
    of = row[way]
    return f"{row[ALONE]['step_ms'] / of['step_ms']:.3f}x, {of['step_ms'] / of['planned_ms']:.2f} of the planned step"


if __name__ == "__main__":
    main()
