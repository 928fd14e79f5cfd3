"""Speed and memory of each goal beside what else shortens a step: other schedules of torch, which need other stages.

Four emulated devices run torch's real engine: 8 microbatches, 8 equal layers, nothing that makes ranks meet. The other
schedules cut the model into two stages on each rank. Every operation sleeps as long as a slow device would compute, so
no figure says anything about a GPU.

Writes results/hosts/alternatives.json and the table into docs/when.md.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from benchmarks.hosts.goals import PHASES, SIZE
from benchmarks.hosts.overlapping import RATES, SETTLE, step_ms, train
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import setup, start
from tf_adapters.schedule.deferral import whole_microbatches_held
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.paired import PairedSettings

RESULTS = result_file("hosts/alternatives.json")
HOST = "torch"
PAGE = ROOT / "docs" / "when.md"
ALONE = "1f1b"
SCHEDULES = {
    ALONE: "1F1B, the host alone",
    "interleaved": "interleaved 1F1B, 2 stages on a rank",
    "interleaved_zero_bubble": "interleaved zero bubble, 2 stages on a rank",
    "zbv": "ZBV, 2 stages on a rank",
}
GOALS: dict[str, dict[str, Any]] = {
    '1F1B, `"goal": "exact"`': {"goal": "exact"},
    '1F1B, `"goal": "exact"`, `"extra_microbatches": 2`': {"goal": "exact", "extra_microbatches": 2},
    '1F1B, `"goal": "exact"`, `"extra_microbatches": 4`': {"goal": "exact", "extra_microbatches": 4},
    '1F1B, `"goal": "pays"`': {"goal": "pays"},
    '1F1B, `"goal": "paper"`': {"goal": "paper"},
}
OTHER_STAGES, SETTING = "the stages, the schedule", "a setting"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.table:
        with RankPool(SIZE.ranks, functools.partial(setup, HOST)) as pool:
            for schedule in SCHEDULES:
                keep(SCHEDULES[schedule], _of_all(pool.run(run, schedule, None, timeout_s=1200)))
            for name, settings in GOALS.items():
                keep(name, _of_all(pool.run(run, ALONE, settings, timeout_s=1200)))
    text = table(read_rows())
    put_table(PAGE, "alternatives", text)
    print(text)


def keep(name: str, row: dict[str, Any]) -> None:
    """Replace the figures of one row, and where they come from."""
    print(name, {key: value for key, value in row.items() if key != "losses"}, flush=True)
    order = [*SCHEDULES.values(), *GOALS]
    keep_row(RESULTS, "rows", {name: {**row, "machine": machine(HOST)}}, order, device="emulated", rate=RATES[HOST])


def read_rows() -> dict[str, Any]:
    """The figures that have been measured, by name."""
    return read_part(RESULTS, "rows")


def _of_all(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What one rank says for all, with the losses of a rank that has them."""
    return {**ranks[0], "losses": next(rank["losses"] for rank in ranks if None not in rank["losses"])}


def run(schedule: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    """The step in stable freezing, or of the host alone, and the losses. Called on all ranks at once."""
    given = {"monitoring_precision": 0.02, "replan_threshold": 0.0, **(settings or {})}
    freezing = PairedSettings(**PHASES, max_freeze_ratio=None, output_dir="runs/bench/alternatives", settings=given)
    with EmulatedDevice(RATES[HOST], real_time=True) as device:
        training = start(HOST, freezing, alone=settings is None, size=replace(SIZE, schedule=schedule))
        begins, losses = train(training, freezing.steps)
        if settings is None:
            order, settled, skipped = _host_order(training.attach()), SETTLE, 0.0
        else:
            state = training.adapter.controller.state
            order = state.plan.schedule or training.adapter.controller.schedule
            settled, skipped = state.phases.progressive_end + SETTLE, state.plan.mean_freeze_ratio
        training.detach()
    return {
        "step_ms": step_ms(begins[settled:]),
        "held": whole_microbatches_held(order),
        "skipped": skipped,
        "losses": losses,
        "emulation_error": device.error,
    }


def _host_order(adapter: Any) -> PipelineSchedule:
    order: PipelineSchedule = adapter.controller.schedule
    return order


def table(rows: dict[str, Any]) -> str:
    """One line for each schedule and for each goal."""
    first = rows[SCHEDULES[ALONE]]
    lines = []
    for name, row in rows.items():
        edits = "-" if row is first else SETTING if name in GOALS else OTHER_STAGES
        same = "yes" if row["losses"] == first["losses"] else "no"
        lines.append(
            [name, f"{first['step_ms'] / row['step_ms']:.3f}x", f"{row['held']:.1f}".removesuffix(".0"), same, edits]
        )
    return markdown_table(["", "speed", "microbatches held", "same losses", "what you change"], lines)


if __name__ == "__main__":
    main()
