"""Compare the CPU time of default (exact) steps with that of the host alone, summed over ranks.

1F1B on two real ranks, the examples' models, one thread a rank. Both trainings run step by step in turn in the same
processes. CPU time does not include waiting, so it does not show the speedup. Freed memory stays with the process, as
with the allocators of GPUs. The table also has the ratio for the first step, which checks all layers, as audits do.

``--against CHECKOUT`` runs the same in another checkout of this repository, in turn with this one, prints the ratio of
the two prices and writes no file. Otherwise writes results/hosts/price.json and the table into docs/deferral.md.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.hosts.levers import join
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import HOSTS, RANKS, Size, start
from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import PairedSettings

RESULTS = result_file("hosts/price.json")
PAGE = ROOT / "docs" / "deferral.md"
SIZES = (Size(width=256, layers=4), Size(width=1024, layers=2, microbatches=4))
FREEZING: dict[str, Any] = {"max_freeze_ratio": None, "warmup": 2, "monitoring": 14, "progressive": 0}
STEPS = 16
"""Steps of stable training that are measured, without control steps: those run as the host."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--against", metavar="CHECKOUT", type=Path)
    parser.add_argument("--turns", type=int, default=3, help="measurements of each checkout (default 3)")
    parser.add_argument("--print-rows", action="store_true", help="only measure, and print the rows as JSON")
    args = parser.parse_args()
    if args.against is not None:
        compare(args.hosts, args.against.resolve(), args.turns)
        return
    rows = {host: measured(host) for host in args.hosts}
    if args.print_rows:
        print(json.dumps(rows))
        return
    write_json(RESULTS, {"machine": machine(*HOSTS), "hosts": rows})
    text = table(rows)
    put_table(PAGE, "price", text)
    print(text)


def measured(host: str) -> list[dict[str, float]]:
    """Return a row for each size."""
    with RankPool(RANKS, functools.partial(join, host)) as ranks:
        return [ranks.run(row, host, size, timeout_s=1800)[0] for size in SIZES]


def row(host: str, size: Size) -> dict[str, float]:
    """Return the host's CPU time (ms, all ranks), the ratio of exact steps to it, and its standard error.

    Called on all ranks at once.
    """
    settings = {"replan_threshold": 0.0}
    freezing = PairedSettings(**FREEZING, stable=STEPS, output_dir=f"runs/bench/price/{host}", settings=settings)
    alone = start(host, freezing, alone=True, size=size)
    exact = start(host, freezing, size=size)
    state = exact.adapter.controller.state
    first_alone, first = in_turn(alone.step, exact.step, 0)
    pairs: list[tuple[float, float]] = []
    for number in range(1, freezing.steps):
        pair = in_turn(alone.step, exact.step, number)
        planned = number >= freezing.steps - STEPS
        # An older checkout has no control steps.
        if planned and getattr(state, "control_step", None) != state.completed_steps:
            pairs.append(pair)
    ratios = [ours / theirs for theirs, ours in pairs]
    exact.detach()
    return {
        "width": size.width,
        "microbatches": size.microbatches,
        "alone_ms": statistics.median(theirs for theirs, _ in pairs),
        "ratio": statistics.median(ratios),
        "error": statistics.stdev(ratios) / len(ratios) ** 0.5,
        "first_step_ratio": first / first_alone,
        "same_loss": exact.held_out_loss() == alone.held_out_loss(),
    }


def in_turn(alone: Callable[[], Any], exact: Callable[[], Any], number: int) -> tuple[float, float]:
    """Run a step of both, and return their CPU times. ``number`` chooses the first one."""
    if number % 2:
        theirs = cpu_ms(alone)
        return theirs, cpu_ms(exact)
    ours = cpu_ms(exact)
    return cpu_ms(alone), ours


def cpu_ms(step: Callable[[], Any]) -> float:
    """Run a step and return the CPU time of all ranks, ms."""
    dist.barrier()
    began = time.process_time()
    step()
    of_ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(of_ranks, (time.process_time() - began) * 1e3)
    return sum(of_ranks)


def compare(hosts: Sequence[str], other: Path, count: int) -> None:
    """Print the price of this checkout beside that of ``other``."""
    turns = [(rows_of(ROOT, hosts), rows_of(other, hosts)) for _ in range(count)]
    for host in hosts:
        for place, size in enumerate(SIZES):
            ours, theirs = ([turn[which][host][place]["ratio"] for turn in turns] for which in (0, 1))
            ratio = statistics.median(ours) / statistics.median(theirs)
            print(
                f"{HOSTS[host]}, {size.width} wide: {ratio:.3f}; here {listed(ours)}; there {listed(theirs)}",
                flush=True,
            )


def rows_of(checkout: Path, hosts: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    """Measure in a process of its own, with the packages of ``checkout``."""
    command = [sys.executable, str(Path(__file__).resolve()), "--print-rows", "--hosts", *hosts]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True)
    rows: dict[str, list[dict[str, float]]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    """Return a table with a row for each size and a column for each host."""
    lines = []
    for of_size in zip(*rows.values(), strict=True):
        size = of_size[0]
        lines.append([f"2 x {size['microbatches']:.0f}, {size['width']:,.0f} wide", *map(cell, of_size)])
    return markdown_table(["", *(HOSTS[host] for host in rows)], lines)


def cell(of: dict[str, float]) -> str:
    more, error = 100 * (of["ratio"] - 1), 100 * of["error"]
    return f"{more:+.1f}% ± {error:.1f}; first step {100 * (of['first_step_ratio'] - 1):+.0f}%"


if __name__ == "__main__":
    main()
