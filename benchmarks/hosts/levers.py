"""The three levers side by side on two real CPU ranks: deferred weight gradients, sampled tokens, frozen tensors.

1F1B on every host, the examples' models, one thread a rank, nothing emulated. All trainings of a host run step by step
in turn in the same processes; speedups are medians over rounds, each to the host alone in the same round. Losses are
held-out ones after equal steps, from scratch. Freed memory stays with the process, as with the allocators of GPUs.
Two more figures are measured. ``cores_together`` is the slowdown of a product when all cores compute at once. The
overhead is the cost of an adapter that neither defers nor freezes, on steps so short that milliseconds show
(``--only-overhead`` measures only this).

Writes results/hosts/levers.json, host by host, and the table into docs/deferral.md.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import keep_freed_memory, machine
from benchmarks.shared.trainings import HOSTS, RANKS, Size, Training, setup, start
from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import PairedSettings, in_rotation, timed_step

RESULTS = result_file("hosts/levers.json")
PAGE = ROOT / "docs" / "deferral.md"
FREEZING = {"warmup": 2, "monitoring": 14, "progressive": 0, "stable": 14}
DEFERRED: dict[str, Any] = {"weight_gradients": "deferred"}
TOKENS: dict[str, Any] = {"granularity": "token"}
ALONE = "host alone"


@dataclass(frozen=True)
class Round:
    """Trainings that run in turn: by name their settings."""

    size: Size
    ways: dict[str, dict[str, Any]]


EXACT = {**DEFERRED, "max_freeze_ratio": 0.0}
WIDE = Size(microbatches=8, width=1024, layers=2)
ROUNDS = (
    Round(
        Size(microbatches=8, width=384, layers=4),
        {"deferred, exact": EXACT, "tensors frozen, in place": {}, "tokens sampled, in place": TOKENS},
    ),
    Round(WIDE, {"deferred, exact": EXACT}),
    Round(
        WIDE,
        {
            "tensors frozen, deferred": {**DEFERRED, "max_freeze_ratio": 0.5},
            "tokens sampled, deferred": {**DEFERRED, **TOKENS, "max_freeze_ratio": 0.5},
        },
    ),
    Round(replace(WIDE, microbatches=4), {"deferred, exact": EXACT}),
)
SHORT = Size(microbatches=8, width=64, layers=2, context=16, micro_batch=1)
SHORT_STEPS, WIDE_STEPS = 300, 6


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--only-overhead", action="store_true")
    args = parser.parse_args()
    for host in args.hosts:
        with RankPool(RANKS, functools.partial(join, host)) as ranks:
            if not args.only_overhead:
                of_rounds = [ranks.run(in_turn, host, each, timeout_s=1800)[0] for each in ROUNDS]
                keep("hosts", host, [row for rows in of_rounds for row in rows])
            keep("overhead", host, ranks.run(overhead, host, timeout_s=1800)[0])
        print(table(json.loads(RESULTS.read_text())), flush=True)
    record = json.loads(RESULTS.read_text())
    put_table(PAGE, "levers", table(record))
    if not args.only_overhead:
        with RankPool(RANKS) as ranks:
            record["cores_together"] = statistics.fmean(ranks.run(cores_together))
        write_json(RESULTS, record)
        print(f"a product takes {record['cores_together']:.3f} times as long where all cores compute")


def cores_together() -> float:
    """On a rank: how many times as long a product takes where all ranks compute as where it alone does."""
    matrix, times = torch.randn(512, 512), {True: list[float](), False: list[float]()}
    for turn in range(8 * RANKS):
        for together in (True, False):
            dist.barrier()
            if together or turn % RANKS == dist.get_rank():
                start_s = time.perf_counter()
                for _ in range(100):
                    torch.mm(matrix, matrix)
                times[together].append(time.perf_counter() - start_s)
    return statistics.median(times[True]) / statistics.median(times[False])


def join(host: str) -> None:
    """Join the ranks, and keep what is freed."""
    keep_freed_memory()
    setup(host)


def keep(part: str, host: str, figures: Any) -> None:
    """Replace the figures of a host."""
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"hosts": {}, "overhead": {}}
    found = {**record[part], host: figures}
    record[part] = {name: found[name] for name in HOSTS if name in found}
    record |= {"machine": machine(*HOSTS), "freezing": FREEZING}
    write_json(RESULTS, record)


def in_turn(host: str, each: Round) -> list[dict[str, Any]]:
    """A row for each way. Called on all ranks at once."""
    folder = f"runs/bench/levers/{host}"
    freezing = {
        name: PairedSettings(
            **FREEZING, output_dir=f"{folder}/{number}", settings={"replan_threshold": 0.0, **settings}
        )
        for number, (name, settings) in enumerate(each.ways.items())
    }
    trainings = {ALONE: start(host, PairedSettings(**FREEZING), alone=True, size=each.size)}
    trainings |= {name: start(host, of_way, size=each.size) for name, of_way in freezing.items()}
    rounds: list[dict[str, float]] = []
    for number in range(PairedSettings(**FREEZING).steps):
        times = in_rotation({name: training.step for name, training in trainings.items()}, number)
        if number >= FREEZING["warmup"] + FREEZING["monitoring"] + FREEZING["progressive"]:
            rounds.append(times)
    rows = [row(name, trainings[name], each.size, rounds) for name in each.ways]
    for of_way, name in zip(rows, each.ways, strict=True):
        trainings[name].detach()
        of_way["loss"], of_way["loss_alone"] = trainings[name].held_out_loss(), trainings[ALONE].held_out_loss()
    return rows


def overhead(host: str) -> dict[str, float]:
    """Return the cost of attaching, in a step whose plan is in force and 0 everywhere. Called on all ranks at once."""
    freezing = PairedSettings(
        **FREEZING, output_dir=f"runs/bench/levers/{host}/nothing", settings={"max_freeze_ratio": 0.0}
    )
    trainings = {
        ALONE: start(host, freezing, alone=True, size=SHORT),
        "attached": start(host, freezing, size=SHORT),
    }
    steps = {name: training.step for name, training in trainings.items()}
    times = [in_rotation(steps, number) for number in range(freezing.steps + SHORT_STEPS)][freezing.steps :]
    more = [of["attached"] - of[ALONE] for of in times]
    trainings["attached"].detach()
    wide = start(host, freezing, alone=True, size=WIDE)
    return {
        "ms": statistics.median(more),
        "error_ms": statistics.stdev(more) / len(more) ** 0.5,
        "wide_step_ms": statistics.median(timed_step(wide.step) for _ in range(WIDE_STEPS)),
    }


def row(name: str, training: Training, size: Size, rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    controller = training.adapter.controller
    forecast, plan = controller.forecast, controller.state.plan
    return {
        "way": name,
        "microbatches": size.microbatches,
        "width": size.width,
        "speedup": statistics.median(times[ALONE] / times[name] for times in rounds),
        "planned": forecast.unfrozen_ms / forecast.planned_ms,
        "mean_freeze_ratio": plan.mean_freeze_ratio,
        "token_costs": controller.state.measurement.to_json().get("token_costs", {}),
        "failure": controller.state.failure,
    }


def table(record: dict[str, Any]) -> str:
    """Ways down, hosts across."""
    hosts = record["hosts"]
    lines = []
    for of_way in zip(*hosts.values(), strict=True):
        first = of_way[0]
        name = f"2 x {first['microbatches']}, {first['width']:,} wide, {first['way']}"
        lines.append([name, *map(cell, of_way)])
    if missing := record["overhead"].keys() ^ hosts.keys():
        print(f"overhead is not measured on {', '.join(missing)}")
    else:
        lines.append(
            [
                f"2 x 8, {WIDE.width:,} wide, nothing deferred or frozen",
                *map(overhead_cell, record["overhead"].values()),
            ]
        )
    return markdown_table(["", *(HOSTS[host] for host in hosts)], lines)


def overhead_cell(of: dict[str, float]) -> str:
    share = f"{of['ms'] / of['wide_step_ms']:.2%}"
    return f"{of['ms']:.1f} ± {of['error_ms']:.1f} ms more in a step of {of['wide_step_ms']:,.0f} ms: {share}"


def cell(of: dict[str, Any]) -> str:
    frozen = f", {of['mean_freeze_ratio']:.2f} frozen" if of["mean_freeze_ratio"] else ""
    same = of["loss"] == of["loss_alone"]
    loss = ", same loss" if same else f", loss {of['loss']:.3f} (alone {of['loss_alone']:.3f})"
    return f"**{of['speedup']:.2f}x** (planned {of['planned']:.2f}x){frozen}{loss}"


if __name__ == "__main__":
    main()
