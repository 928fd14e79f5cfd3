"""A run that only measures, with one slow replica, and whether what it promises of two levers is what they bring.

LLaMA-3.2-1B's layers in their real shares of the FLOPs on four stages, two replicas, DeepSpeed's real engine, 1F1B, 8
microbatches. Emulated devices: operations sleep as long as a slow device would compute, and no figure says anything
about a GPU. One device is slower than the others. Then the same with weight gradients deferred, and under GPipe.

Writes results/hosts/measure.json, and into docs/measure.md what `tf-adapters show` prints of the report and
the table of promises.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.paper.cells import Cell
from benchmarks.paper.models import forward_flops
from benchmarks.paper.trainings import setup, start
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import machine
from tf_adapters.advice.levers import levers
from tf_adapters.cli import main as tf_adapters_cli
from tf_adapters.report import Report
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.paired import PairedSettings, timed_step

RESULTS = result_file("hosts/measure.json")
PAGE = ROOT / "docs" / "measure.md"
CELL = Cell("deepspeed", "1B", "1f1b", 4)
REPLICAS, SLOW_RANK, SLOWER = 2, 5, 1.2
FORWARD_S = 0.035
STEPS, SETTLE = 8, 2
PHASES = {"warmup": 4, "monitoring": 12, "progressive": 0, "stable": 1}
CHECKED = {
    "goal exact": ({"weight_gradients": "deferred", "max_freeze_ratio": 0.0}, 4 + 8),
    "schedule gpipe": ({"method": "none", "max_freeze_ratio": 0.0}, 0),
}
"""By lever: the settings, and after how many steps it is in force."""


def main() -> None:
    command_line(__doc__).parse_args()
    record: dict[str, Any] = {
        "machine": machine("deepspeed"),
        "device": "emulated",
        "slower": {"rank": SLOW_RANK, "times": SLOWER},
        "measured_ms": {},
    }
    with RankPool(CELL.ranks * REPLICAS, functools.partial(setup, CELL.host)) as ranks:
        record["report"] = json.loads(Path(ranks.run(monitored, timeout_s=300)[0]).read_text())
        keep(record)
        for name in CHECKED:
            record["measured_ms"][name] = ranks.run(under, name, timeout_s=300)[0]
            keep(record)
    print(shown(record["report"]), table(record), sep="\n")


def keep(record: Mapping[str, Any]) -> None:
    """Write what there is so far."""
    write_json(RESULTS, record)
    write_page(record)


def write_page(record: Mapping[str, Any]) -> None:
    """Put a record into the page."""
    put_table(PAGE, "measure", f"```\n{shown(record['report'])}\n```")
    put_table(PAGE, "promises", table(record))


def shown(report: Mapping[str, Any]) -> str:
    """Return the text that `tf-adapters show --no-gantt` prints for a report."""
    file, out = Path("runs") / "shown.json", io.StringIO()
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(report))
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(out):
        tf_adapters_cli(["show", str(file), "--no-gantt"])
    os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return out.getvalue().split("\n\nadd ")[0].rstrip()


def emulation() -> EmulatedDevice:
    slower = SLOWER if dist.get_rank() == SLOW_RANK else 1.0
    return EmulatedDevice(forward_flops(CELL.of) / (FORWARD_S * CELL.ranks * slower), real_time=True)


def monitored() -> str:
    """The report of a run that measures. Called on all ranks at once."""
    freezing = PairedSettings(**PHASES, output_dir="runs/bench/measure", settings={"method": "none"})
    with emulation():
        training = start(CELL, freezing.section())
        for _ in range(sum(PHASES.values())):
            training.step()
        path = str(training.adapter.controller.report_path)
        training.adapter.detach()
    dist.barrier()
    return path


def under(lever: str) -> float:
    """The median step under one lever, ms. Called on all ranks at once."""
    settings, before = CHECKED[lever]
    section = PairedSettings(**{**PHASES, "monitoring": 8}, output_dir="runs/bench/measure/levers", settings=settings)
    cell = CELL if "gpipe" not in lever else Cell(CELL.host, CELL.model, "gpipe", CELL.ranks)
    with emulation():
        training = start(cell, section.section())
        for _ in range(before):
            training.step()
        times = [timed_step(training.step) for _ in range(STEPS)][SETTLE:]
        training.adapter.detach()
    return statistics.median(times)


def table(record: Mapping[str, Any]) -> str:
    if not record["measured_ms"]:
        return ""
    promised = {lever.name: lever.step_ms for lever in levers(Report.from_json(record["report"])).others}
    lines = []
    for name, ms in record["measured_ms"].items():
        lines.append((name, f"{promised[name]:,.0f} ms", f"{ms:,.0f} ms", f"{ms / promised[name]:.3f}"))
    return markdown_table(("lever", "step promised", "step measured", "measured / promised"), lines)


if __name__ == "__main__":
    main()
