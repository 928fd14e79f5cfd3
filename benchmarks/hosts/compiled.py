"""Compiled layers, frozen whole: speedup on two real CPU ranks, and number of compilations.

torch.distributed.pipelining, 1F1B, the Llama of the example, one thread a rank, nothing emulated. Two trainings
run step by step in turn in the same processes, with layers compiled by Inductor: the host alone, and with freezing.
The speedup is the median over rounds, each relative to the host alone in the same round.

Writes results/hosts/compiled.json, and the table into docs/torch_pipelining.md.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.hosts.levers import ALONE, join
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import RANKS, Size, start
from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import PairedSettings, in_rotation

RESULTS = result_file("hosts/compiled.json")
PAGE = ROOT / "docs" / "torch_pipelining.md"
FREEZING = {"warmup": 6, "monitoring": 20, "progressive": 0, "stable": 20}
SIZE = Size(width=256, layers=16, context=64, micro_batch=4, microbatches=8)
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "layers compiled, frozen whole": (True, {"granularity": "block"}),
    "not compiled, frozen whole": (False, {"granularity": "block"}),
    "not compiled, tensors": (False, {}),
}


def main() -> None:
    command_line(__doc__).parse_args()
    rows = {}
    for number, (name, (compiled, settings)) in enumerate(WAYS.items()):
        section = {"replan_threshold": 0.0, "monitoring_precision": 0.02, **settings}
        freezing = PairedSettings(**FREEZING, output_dir=f"runs/bench/compiled/{number}", settings=section)
        with RankPool(RANKS, functools.partial(join, "torch")) as ranks:
            of_ranks = ranks.run(in_turn, freezing, compiled, timeout_s=1500)
        rows[name] = {**of_ranks[0], "compiled_later": max(of_rank["compiled_later"] for of_rank in of_ranks)}
        print(name, rows[name], flush=True)
    write_json(RESULTS, {"machine": machine(), "freezing": FREEZING, "rows": rows})
    put_table(PAGE, "compiled", table(rows))
    print(table(rows))


def in_turn(freezing: PairedSettings, compiled: bool) -> dict[str, Any]:
    """Called on all ranks at once."""
    from torch._dynamo.utils import counters

    size = replace(SIZE, compiled=compiled)
    trainings = {
        ALONE: start("torch", freezing, alone=True, size=size),
        "frozen": start("torch", freezing, size=size),
    }
    rounds, graphs = [], []
    for number in range(freezing.steps):
        rounds.append(in_rotation({name: training.step for name, training in trainings.items()}, number))
        graphs.append(counters["stats"]["unique_graphs"])
    controller = trainings["frozen"].adapter.controller
    forecast, plan, failure = controller.forecast, controller.state.plan, controller.state.failure
    trainings["frozen"].detach()
    stable = rounds[-freezing.stable :]
    measured = statistics.median(times[ALONE] / times["frozen"] for times in stable)
    planned = forecast.unfrozen_ms / forecast.planned_ms
    return {
        "alone_ms": statistics.median(times[ALONE] for times in stable),
        "speedup": measured,
        "planned": planned,
        "measured_over_planned": planned / measured,
        "mean_freeze_ratio": plan.mean_freeze_ratio,
        "graphs": graphs[-1],
        "compiled_later": graphs[-1] - graphs[freezing.warmup - 1],
        "failure": failure,
    }


def table(rows: Mapping[str, Any]) -> str:
    head = ("", "step alone", "speedup", "planned", "measured step / planned", "frozen", "graphs", "compiled later")
    lines = []
    for name, row in rows.items():
        lines.append(
            (
                name,
                f"{row['alone_ms']:.0f} ms",
                f"{row['speedup']:.2f}x",
                f"{row['planned']:.2f}x",
                f"{row['measured_over_planned']:.3f}",
                f"{row['mean_freeze_ratio']:.2f}",
                str(row["graphs"]),
                str(row["compiled_later"]),
            )
        )
    return markdown_table(head, lines)


if __name__ == "__main__":
    main()
