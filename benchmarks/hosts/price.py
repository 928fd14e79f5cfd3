"""Compare the CPU time of default (exact) steps with that of the host alone, summed over ranks.

1F1B on two real ranks, the examples' models, one thread a rank. Both trainings run step by step in turn in the same
processes. CPU time does not include waiting, so it does not show the speedup. Freed memory stays with the process, as
with the allocators of GPUs. The table also has the ratio for the first step, which checks all layers, as audits do.

``--layers`` measures single layers instead: what a tap adds to the CPU time of a layer's forward, backward and weight
gradient, by the layer's width. This too in turn with the plain layer.

``--against CHECKOUT`` runs the same in another checkout of this repository, in turn with this one, prints the ratio of
the two prices and writes no file. Otherwise writes results/hosts/price.json or price_layers.json, and the table into
docs/deferral.md.
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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.hosts.levers import join
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import keep_freed_memory, machine
from benchmarks.shared.trainings import HOSTS, RANKS, Size, start
from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import PairedSettings
from tf_adapters.weight_gradients.tapped_layer import plain_layer
from tf_adapters.weight_gradients.taps import StageTaps

RESULTS = result_file("hosts/price.json")
LAYERS_RESULTS = result_file("hosts/price_layers.json")
PAGE = ROOT / "docs" / "deferral.md"
SIZES = (Size(width=256, layers=4), Size(width=1024, layers=2, microbatches=4))
FREEZING: dict[str, Any] = {"max_freeze_ratio": None, "warmup": 2, "monitoring": 14, "progressive": 0}
TINY = 8
"""Where kernels take no time, so that the row shows what Python and autograd take."""
LAYERS = {TINY: (20, 300), 256: (8, 60), 512: (4, 40), 1024: (2, 24), 2048: (2, 8), 4096: (1, 5)}
"""By width of single layers, how many are in a row, and the number of pairs."""
TOKENS = 1024
STEPS = 16
"""Steps of stable training that are measured, without control steps: those run as the host."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--layers", action="store_true", help="measure single layers, in this process")
    parser.add_argument("--against", metavar="CHECKOUT", type=Path)
    parser.add_argument("--turns", type=int, default=3, help="measurements of each checkout (default 3)")
    parser.add_argument("--print-rows", action="store_true", help="only measure, and print the rows as JSON")
    args = parser.parse_args()
    if args.against is not None:
        compare(args.hosts, args.against.resolve(), args.turns)
        return
    if args.layers:
        torch.set_num_threads(1)
        keep_freed_memory()
        layers = {f"{width:,} wide": tap_row(width, *of_width) for width, of_width in LAYERS.items()}
        write_json(LAYERS_RESULTS, {"machine": machine(), "tokens": TOKENS, "rows": layers})
        put_table(PAGE, "price_layers", layers_table(layers))
        print(layers_table(layers))
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


def tap_row(width: int, count: int, rounds: int) -> dict[str, float]:
    """Return a layer's CPU times in us: its forward and backward alone, and what a tap adds, as medians of pairs."""
    tokens = 2 if width == TINY else TOKENS
    inputs = torch.randn(tokens, width, requires_grad=True)
    plain, tapped = (torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count))) for _ in range(2))
    taps = StageTaps(tapped, plain_layer, by_name=True, sole=True, trusted=True)
    taps.install()
    pairs = []
    for number in range(rounds + 2):
        if number % 2:
            alone = layer_us(plain, inputs, None)
            pairs.append((alone, layer_us(tapped, inputs, taps)))
        else:
            ours = layer_us(tapped, inputs, taps)
            pairs.append((layer_us(plain, inputs, None), ours))
    taps.remove()
    alone, ours = zip(*pairs[2:], strict=True)
    return {
        "tokens": tokens,
        "forward_us": statistics.median(forward for forward, _ in alone),
        "backward_us": statistics.median(backward for _, backward in alone),
        "more_in_forward_us": statistics.median(b[0] - a[0] for a, b in zip(alone, ours, strict=True)),
        "more_later_us": statistics.median(b[1] - a[1] for a, b in zip(alone, ours, strict=True)),
        "more": statistics.median(sum(b) - sum(a) for a, b in zip(alone, ours, strict=True)),
    }


def layer_us(model: torch.nn.Sequential, inputs: torch.Tensor, taps: StageTaps | None) -> tuple[float, float]:
    """Return the CPU times per layer of a forward, and of a backward with all weight gradients, in us."""
    if taps is not None:
        taps.begin_batch()
    began = time.thread_time()
    with nullcontext() if taps is None else taps.recording(0):
        output = model(inputs)
    middle = time.thread_time()
    with nullcontext() if taps is None else taps.recording(0):
        output.backward(torch.ones_like(output))
    if taps is not None:
        taps.compute(0)
    ended = time.thread_time()
    return 1e6 * (middle - began) / len(model), 1e6 * (ended - middle) / len(model)


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


def layers_table(rows: dict[str, dict[str, float]]) -> str:
    """Return a table with a row for each width."""
    lines = [
        [
            f"{name}, {row['tokens']:.0f} tokens",
            f"{row['backward_us'] / 1e3:,.2f} ms",
            f"{row['more_in_forward_us']:+,.0f} us",
            f"{row['more_later_us']:+,.0f} us",
            f"{100 * row['more'] / row['backward_us']:+.1f}%",
        ]
        for name, row in rows.items()
    ]
    titles = ["layer", "its backward", "more in a forward", "in a backward and W", "both, of the backward"]
    return markdown_table(titles, lines)


def cell(of: dict[str, float]) -> str:
    more, error = 100 * (of["ratio"] - 1), 100 * of["error"]
    return f"{more:+.1f}% ± {error:.1f}; first step {100 * (of['first_step_ratio'] - 1):+.0f}%"


if __name__ == "__main__":
    main()
