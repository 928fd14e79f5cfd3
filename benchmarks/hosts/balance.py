"""Gain of another cut as `tf-adapters balance` promises it, and as measured on the hosts' real engines.

LLaMA-3.2-1B's layers, whose output layer is as much work as four blocks, on four ranks, 1F1B, 8 microbatches: cut into
equal numbers of blocks, then as the report of that run advises. Emulated devices: operations sleep as long as a slow
device would compute, and no figure says anything about a GPU. Both times the host trains alone.

Writes results/hosts/balance.json, host by host, and the table into docs/balance.md.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch.distributed as dist

from benchmarks.paper.cells import HOSTS, Cell
from benchmarks.paper.models import forward_flops
from benchmarks.paper.trainings import setup, start
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from tf_adapters.advice.balance import balance
from tf_adapters.report import Report
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.paired import PairedSettings, timed_step

RESULTS = result_file("hosts/balance.json")
PAGE = ROOT / "docs" / "balance.md"
FORWARD_S = 0.035
STEPS, SETTLE = 10, 2
SETTINGS = {"method": "none", "max_freeze_ratio": 0.0}
PHASES = {"warmup": 5, "monitoring": 10, "progressive": 0, "stable": 1}


@dataclass(frozen=True)
class CutCell(Cell):
    """A cell with boundaries of its own: where the stages begin, and the number of layers."""

    cuts: tuple[int, ...] = ()

    @property
    def boundaries(self) -> list[int]:
        return list(self.cuts) or super().boundaries


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    for host in parser.parse_args().hosts:
        keep(host, measure(host))
    text = table(read_rows())
    put_table(PAGE, "balance", text)
    print(text)


def read_rows() -> dict[str, Any]:
    return read_part(RESULTS, "hosts")


def keep(host: str, row: Mapping[str, Any]) -> None:
    packages = ("deepspeed", "megatron-core")
    keep_row(RESULTS, "hosts", {host: row}, HOSTS, machine=machine(*packages), device="emulated")


def measure(host: str) -> dict[str, Any]:
    cell = CutCell(host, "1B", "1f1b", 4)
    with RankPool(cell.ranks, functools.partial(setup, host)) as ranks:
        report = ranks.run(monitored, cell, timeout_s=300)[0]
        advised = balance(Report.read(report))
        parts = advised.best.layers
        then = replace(cell, cuts=tuple(accumulate((len(part) for part in parts), initial=0)))
        now_ms, then_ms = (ranks.run(alone, which, timeout_s=300)[0] for which in (cell, then))
    row = {
        "now": [len(part) for part in advised.now.layers],
        "then": [len(part) for part in parts],
        "now_ms": now_ms,
        "then_ms": then_ms,
        "promised": advised.gain,
        "measured": now_ms / then_ms,
    }
    print(host, row, flush=True)
    return row


def emulation(cell: Cell) -> EmulatedDevice:
    return EmulatedDevice(forward_flops(cell.of) / (FORWARD_S * cell.ranks), real_time=True)


def monitored(cell: Cell) -> str:
    """The report of a run that measures and freezes nothing. Called on all ranks at once."""
    freezing = PairedSettings(**PHASES, output_dir=f"runs/bench/balance/{cell.host}", settings=SETTINGS)
    with emulation(cell):
        training = start(cell, freezing.section())
        for _ in range(sum(PHASES.values())):
            training.step()
        path = str(training.adapter.controller.report_path)
        training.adapter.detach()
    if cell.host == "megatron-core":
        import tf_adapters.megatron

        tf_adapters.megatron.revert()
    dist.barrier()
    return path


def alone(cell: Cell) -> float:
    """The median step of the host alone, ms. Called on all ranks at once."""
    with emulation(cell):
        training = start(cell, None)
        return statistics.median([timed_step(training.step) for _ in range(STEPS)][SETTLE:])


def table(rows: Mapping[str, Any]) -> str:
    head = ("host", "layers on the stages", "advised", "promised", "measured", "measured / promised")
    lines = []
    for host, row in rows.items():
        lines.append(
            (
                HOSTS[host],
                f"{_counts(row['now'])}: {row['now_ms']:,.0f} ms",
                f"{_counts(row['then'])}: {row['then_ms']:,.0f} ms",
                f"{row['promised']:.3f}x",
                f"{row['measured']:.3f}x",
                f"{row['measured'] / row['promised']:.3f}",
            )
        )
    return markdown_table(head, lines)


def _counts(layers: list[int]) -> str:
    return " + ".join(map(str, layers))


if __name__ == "__main__":
    main()
