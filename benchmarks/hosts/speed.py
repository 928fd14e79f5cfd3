"""Gain and cost of freezing on every host with the current defaults: the table in README.md.

Two pipeline ranks on this machine's CPU, one thread each, 1F1B, the examples' models. For each host two trainings
run step by step in turn in the same processes, one alone and one that freezes; speedups are medians over pairs. The
cost of an adapter that does not freeze is measured by one training with and without it, in turn. Memory is the
peak above an idle process, in separate processes.

Writes results/hosts/speed.json, host by host, and the table into README.md. ``--table`` writes only the
table, from what is in results/hosts/speed.json.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import machine, peak_above_idle, peak_memory
from benchmarks.shared.trainings import HOSTS, RANKS, setup, start
from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import Outcome, PairedSettings, compare, on_and_off

RESULTS = result_file("hosts/speed.json")
README = ROOT / "README.md"
FREEZING = PairedSettings(warmup=10, monitoring=40, progressive=10, stable=30)
NEVER = 10**6
NOT_FREEZING_PAIRS = 40
SETTLE = 12
"""Steps before those whose memory counts: warm-up and monitoring of a short training are over."""


@dataclass(frozen=True)
class Row:
    """One host. Ratios are to the host alone; None is what was not measured.

    Attributes:
        steps: of each training.
        stable_step_ratio: step time in stable freezing, measured.
        planned_step_ratio: the same as planned.
        mean_freeze_ratio: of the plan, in [0, 1].
        not_freezing_step_ratio: step time with an adapter that does not freeze.
        peak_bytes_alone, peak_bytes_freezing: by pipeline rank.
        held_out_loss_alone, held_out_loss_freezing: after equal steps, from scratch.
    """

    host: str
    steps: int
    stable_step_ratio: float
    planned_step_ratio: float
    mean_freeze_ratio: float
    not_freezing_step_ratio: float | None
    peak_bytes_alone: list[int] | None
    peak_bytes_freezing: list[int] | None
    held_out_loss_alone: float
    held_out_loss_freezing: float

    @property
    def peak_ratios(self) -> str:
        if self.peak_bytes_alone is None or self.peak_bytes_freezing is None:
            return "-"
        pairs = zip(self.peak_bytes_freezing, self.peak_bytes_alone, strict=True)
        return ", ".join(f"{freezing / alone:.2f}" for freezing, alone in pairs)


CELLS: dict[str, Callable[[Row], str]] = {
    "speedup in stable freezing, measured": lambda row: f"{1 / row.stable_step_ratio:.2f}x",
    "speedup as planned": lambda row: f"{1 / row.planned_step_ratio:.2f}x",
    "mean freeze ratio of the plan": lambda row: f"{row.mean_freeze_ratio:.2f}",
    "step time, attached but not freezing / alone": lambda row: (
        "-" if row.not_freezing_step_ratio is None else f"{row.not_freezing_step_ratio:.3f}"
    ),
    "peak memory by rank, freezing / alone": lambda row: row.peak_ratios,
    "held-out loss at equal steps, alone / freezing": lambda row: (
        f"{row.held_out_loss_alone:.3f} / {row.held_out_loss_freezing:.3f}"
    ),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    for host in [] if args.table else args.hosts:
        keep(measure(host))
        print(table(read_rows()), flush=True)
    put_table(README, "speed", table(read_rows()))


# --- results -------------------------------------------------------------------------------------------------


def read_rows() -> list[Row]:
    """Return the measured rows, in the order of HOSTS."""
    return [Row(**row) for row in json.loads(RESULTS.read_text())["rows"]]


def keep(row: Row) -> None:
    """Replace the row of a host; rows of another machine or with other settings are dropped."""
    record = {"machine": machine(*HOSTS), "freezing": asdict(FREEZING)}
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    same = {name: old.get(name) for name in record} == record
    rows = [other for other in old["rows"] if other["host"] != row.host] if same else []
    rows = sorted([*rows, asdict(row)], key=lambda one: list(HOSTS).index(one["host"]))
    write_json(RESULTS, {**record, "rows": rows})


def table(rows: Sequence[Row]) -> str:
    """The rows as columns of a Markdown table."""
    lines = [[title, *map(cell, rows)] for title, cell in CELLS.items()]
    return markdown_table(["", *(HOSTS[row.host] for row in rows)], lines)


# --- measuring -----------------------------------------------------------------------------------------------


def measure(host: str) -> Row:
    join = functools.partial(setup, host)
    freezing = replace(FREEZING, output_dir=f"runs/bench/{host}")
    with RankPool(RANKS, join) as ranks:
        outcome: Outcome = ranks.run(with_and_without, host, freezing, timeout_s=1800)[0]
        # In a folder of its own: at its end it leaves a report, too.
        waits = replace(freezing, warmup=NEVER, output_dir=f"runs/bench/{host}/waits")
        idle: float = ranks.run(not_freezing_ratio, host, waits, timeout_s=1800)[0]
    short = replace(freezing, warmup=3, monitoring=6, progressive=0, output_dir=f"runs/bench/{host}/memory")
    peaks = {alone: peak_memory(RANKS, join, peak_of_rank, host, short, alone) for alone in (True, False)}
    return Row(
        host=host,
        steps=freezing.steps,
        stable_step_ratio=outcome.pairs.ratio("stable"),
        planned_step_ratio=outcome.planned_ratio,
        mean_freeze_ratio=json.loads(Path(outcome.report).read_text())["plan"]["mean_freeze_ratio"],
        not_freezing_step_ratio=idle,
        peak_bytes_alone=peaks[True],
        peak_bytes_freezing=peaks[False],
        held_out_loss_alone=outcome.held_out_alone,
        held_out_loss_freezing=outcome.held_out_attached,
    )


def with_and_without(host: str, freezing: PairedSettings) -> Outcome:
    """Train the host alone and with freezing, in turn. Called on all ranks at once."""
    alone, frozen = start(host, freezing, alone=True), start(host, freezing)
    return compare(
        alone.step,
        frozen.step,
        frozen.adapter,
        freezing.steps,
        held_out=lambda: (alone.held_out_loss(), frozen.held_out_loss()),
    )


def not_freezing_ratio(host: str, freezing: PairedSettings) -> float:
    """Step time with an adapter in its warm-up, over that of the host alone. Called on all ranks at once."""
    training = start(host, freezing)
    pairs = on_and_off(
        training.step, attach=training.attach, detach=training.detach, phase="warmup", pairs=NOT_FREEZING_PAIRS
    )
    return pairs.ratio("warmup")


def peak_of_rank(host: str, freezing: PairedSettings, alone: bool) -> int:
    """Bytes; the adapter's code is loaded first, since it is no part of a step's memory."""
    import importlib

    adapter: Any = {"megatron-core": "megatron", "torch": "torch_pipelining"}.get(host, host)
    importlib.import_module(f"tf_adapters.{adapter}.adapter")
    return peak_above_idle(lambda: start(host, freezing, alone=alone).step, settle=SETTLE)


if __name__ == "__main__":
    main()
