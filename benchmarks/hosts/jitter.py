"""Speed of each goal on devices whose speed varies, and over a link that stalls, beside the host alone.

A plan fixes the order of a batch for all steps. The host's own order is fixed, too. This shows which of them loses more
where actions do not take the time that was measured. Four emulated devices run torch's real engine: 1F1B, 8
microbatches, equal stages, nothing that makes ranks meet. The speed of each device is drawn anew every 60 ms, which is
the time of a forward. Of a link, every 40th message takes 120 ms longer.

Writes results/hosts/jitter.json and the table into docs/deferral.md.
"""

from __future__ import annotations

import functools
import random
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from benchmarks.hosts.overlapping import RATES, SETTLE, step_ms, train
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import Size, setup, start
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.emulated_link import EmulatedLinks, Link
from tf_adapters.testing.paired import Freezing

RESULTS = result_file("hosts/jitter.json")
PAGE = ROOT / "docs" / "deferral.md"
HOST = "torch"
ALONE = "host alone"
WAYS: dict[str, dict[str, Any]] = {
    "exact": {"goal": "exact"},
    "exact, extra_microbatches 4": {"goal": "exact", "extra_microbatches": 4},
    "pays": {"goal": "pays"},
    "paper": {"goal": "paper"},
}
JITTER = {"no jitter": 0.0, "5%": 0.05, "10%": 0.10, "20%": 0.20}
"""Standard deviation of a device's speed, as a share."""
STALLS = "a link that stalls"
SPEED_LASTS_MS = 60.0
EVERY, STALL_S = 40, 0.12
SIZE = Size(4, layers=8, width=192, context=16, micro_batch=2, microbatches=8, clip=0.0)
PHASES = {"warmup": 2, "monitoring": 12, "progressive": 0, "stable": 30}


class StallingLinks(EmulatedLinks):
    """Links without delay, except that one in ``EVERY`` messages between ranks 1 and 2 arrives ``STALL_S`` later."""

    def __init__(self, seed: int) -> None:
        super().__init__(edges={(1, 2): Link()})
        self._random = random.Random(seed)

    def arrival(self, peer: int, link: Link, size: int) -> tuple[float, float]:
        sent, arrives = super().arrival(peer, link, size)
        return sent, arrives + (STALL_S if self._random.random() < 1.0 / EVERY else 0.0)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--conditions", nargs="+", choices=[*JITTER, STALLS], default=[*JITTER, STALLS])
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    for condition in [] if args.table else args.conditions:
        with RankPool(SIZE.ranks, functools.partial(setup, HOST)) as pool:
            row = {way: pool.run(run, condition, way, timeout_s=1200)[0] for way in (ALONE, *WAYS)}
        row["machine"] = machine(HOST)
        print(condition, {way: row[way]["step_ms"] for way in (ALONE, *WAYS)}, flush=True)
        keep_row(RESULTS, "rows", {condition: row}, [*JITTER, STALLS], device="emulated", rate=RATES[HOST])
    text = table(read_rows())
    put_table(PAGE, "jitter", text)
    print(text)


def read_rows() -> dict[str, Any]:
    """The figures that have been measured, by condition."""
    return read_part(RESULTS, "rows")


def run(condition: str, way: str) -> dict[str, Any]:
    """The step in stable freezing beside the plan's. Called on all ranks at once."""
    settings = {"monitoring_precision": 0.02, "replan_threshold": 0.0, **WAYS.get(way, {})}
    freezing = Freezing(**PHASES, max_freeze_ratio=None, output_dir=f"runs/bench/jitter/{way}", settings=settings)
    seed = dist.get_rank()
    device = EmulatedDevice(
        RATES[HOST], jitter=JITTER.get(condition, 0.0), jitter_ms=SPEED_LASTS_MS, seed=seed, real_time=True
    )
    with device, StallingLinks(seed) if condition == STALLS else nullcontext():
        training = start(HOST, freezing, alone=way == ALONE, size=SIZE)
        begins, _ = train(training, freezing.steps)
        if way == ALONE:
            return {"step_ms": step_ms(begins[SETTLE:]), "emulation_error": device.error}
        controller = training.adapter.controller
        settled = controller.state.phases.progressive_end + SETTLE
        forecast, state = controller.forecast, controller.state
        training.detach()
        return {
            "step_ms": step_ms(begins[settled:]),
            "planned_ms": forecast.planned_ms,
            "frozen": state.plan.mean_freeze_ratio,
            "steps": state.measurement.steps,
            "emulation_error": device.error,
        }


def table(rows: dict[str, Any]) -> str:
    """One line for each condition, one column for the host and for each goal."""
    lines = [
        [condition, f"{row[ALONE]['step_ms']:,.0f} ms", *(_cell(row, way) for way in WAYS)]
        for condition, row in rows.items()
    ]
    head = ["", ALONE, *WAYS]
    return markdown_table(head, lines)


def _cell(row: dict[str, Any], way: str) -> str:
    of = row[way]
    return f"{row[ALONE]['step_ms'] / of['step_ms']:.3f}x, {of['step_ms'] / of['planned_ms']:.2f} of the planned step"


if __name__ == "__main__":
    main()
