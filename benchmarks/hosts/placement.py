"""Speed with two stages on each rank in a V, on Megatron-Core and DeepSpeed, beside 1F1B and interleaving.

Four emulated devices, equal layers on all ranks, the same first weights in every way of a host. Where gradients are
clipped, all ranks meet for the norm in every step; DeepSpeed then has ZeRO 1. Without clipping steps overlap. Every
operation sleeps as long as a slow device would compute: order, communication and waiting are the host's own, durations
are emulated, and no figure says anything about a GPU.

Writes results/hosts/placement.json and the table into docs/when.md.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from benchmarks.hosts.alternatives import of_all
from benchmarks.hosts.overlapping import MAX_NORM, RATES, SETTLE, step_ms, train
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import HOSTS as NAMES
from benchmarks.shared.trainings import Size, setup, start
from tf_adapters.schedule.deferral import whole_microbatches_held
from tf_adapters.schedule.orders import one_forward_one_backward
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.paired import PairedSettings

RESULTS = result_file("hosts/placement.json")
PAGE = ROOT / "docs" / "when.md"
PHASES = {"warmup": 2, "monitoring": 12, "progressive": 0, "stable": 26}
"""40 steps, whose losses are compared."""
HOSTS = ("megatron-core", "deepspeed")
SIZES = {
    "4 x 8": Size(4, layers=16, width=192, context=16, micro_batch=2, microbatches=8, weights_by_name=True),
    "8 x 16": Size(8, layers=16, width=192, context=16, micro_batch=2, microbatches=16, weights_by_name=True),
}
CLIPPING = ("clipped", "not clipped")
ALONE = "1F1B, the host alone"
WAYS: dict[str, dict[str, Any]] = {
    ALONE: {"exact": False},
    "1F1B, exact": {},
    "interleaved, the host alone": {"looped": 2, "exact": False},
    "interleaved, exact": {"looped": 2},
    "V, exact": {"looped": 2, "in_v": True},
    "V, exact, 5/8 of the memory": {"looped": 2, "in_v": True, "extra": -3},
    "V, exact, half of the memory": {"looped": 2, "in_v": True, "extra": -4},
}
"""What a way changes: ``exact`` and ``extra``, microbatches of a stage more than the host's, are ours.

The rest is the size's. The ways with less memory are for 4 x 8 on DeepSpeed, where gradients are clipped.
"""
LESS = "of the memory"
LESS_ON = "deepspeed, 4 x 8, clipped"
ROWS = [
    f"{host}, {size}, {clipping}, {way}"
    for host in HOSTS
    for size in SIZES
    for clipping in CLIPPING
    for way in WAYS
    if (host == "megatron-core" or not way.startswith("interleaved"))
    and (not way.endswith(LESS) or f"{host}, {size}, {clipping}" == LESS_ON)
]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["4 x 8"])
    parser.add_argument("--clipping", nargs="+", choices=CLIPPING, default=list(CLIPPING))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    for name in [] if args.table else ROWS:
        host, size, clipping, way = name.split(", ", 3)
        if way in args.ways and host in args.hosts and size in args.sizes and clipping in args.clipping:
            measure(name)
    text = table(read_rows())
    put_table(PAGE, "placement", text)
    print(text)


def measure(name: str) -> None:
    """Measure and keep one row."""
    host, size, *_ = name.split(", ")
    with RankPool(SIZES[size].ranks, functools.partial(setup, host)) as pool:
        row = of_all(pool.run(run, name, timeout_s=2400))
    print(name, {key: value for key, value in row.items() if key != "losses"}, flush=True)
    keep_row(RESULTS, "rows", {name: {**row, "machine": machine(host)}}, ROWS, device="emulated", rates=RATES)


def read_rows() -> dict[str, Any]:
    """The figures that have been measured, by host, size, clipping and way."""
    return read_part(RESULTS, "rows")


def run(name: str) -> dict[str, Any]:
    """The step in stable freezing, or of the host alone, and the losses. Called on all ranks at once."""
    host, of_size, clipping, way = name.split(", ", 3)
    changed = dict(WAYS[way])
    exact, extra = changed.pop("exact", True), changed.pop("extra", 0)
    size = replace(SIZES[of_size], clip=MAX_NORM[host] if clipping == "clipped" else 0.0, **changed)
    settings = {
        "goal": "exact",
        "placement": "v" if size.in_v else "host",
        "extra_microbatches": extra,
        "monitoring_precision": 0.02,
        "replan_threshold": 0.0,
    }
    freezing = PairedSettings(**PHASES, max_freeze_ratio=None, output_dir="runs/bench/placement", settings=settings)
    with EmulatedDevice(RATES[host], real_time=True) as device:
        training = start(host, freezing, alone=not exact, size=size)
        begins, losses = train(training, freezing.steps)
        settled, planned = SETTLE, None
        if exact:
            state = training.adapter.controller.state
            order, planned = state.plan.schedule or state.schedule, state.plan.span_ms.planned
            settled += state.phases.progressive_end
        elif size.looped:
            order = training.attach().controller.schedule
        else:
            order = one_forward_one_backward(size.ranks, size.microbatches)
        step = step_ms(begins[settled:])
        if exact or size.looped:
            training.detach()
    return {
        "step_ms": step,
        "planned_ms": planned,
        "held": whole_microbatches_held(order),
        "losses": losses,
        "emulation_error": device.error,
    }


def table(rows: dict[str, Any]) -> str:
    """One line for each way. Speeds are over 1F1B of the host alone at the same size."""
    lines = []
    for key, row in rows.items():
        host, size, clipping, way = key.split(", ", 3)
        alone = rows[f"{host}, {size}, {clipping}, {ALONE}"]
        planned = "-" if row["planned_ms"] is None else f"{row['step_ms'] / row['planned_ms']:.3f}"
        held = f"{row['held']:.1f}".removesuffix(".0")
        speed = f"{alone['step_ms'] / row['step_ms']:.3f}x"
        same = "yes" if row["losses"] == alone["losses"] else _difference(row["losses"], alone["losses"])
        lines.append([NAMES[host], size, clipping, way, speed, planned, held, same])
    heads = [
        "host",
        "ranks x microbatches",
        "gradients",
        "",
        "speed",
        "of the planned step",
        "microbatches held",
        "same losses",
    ]
    return markdown_table(heads, lines)


def _difference(losses: list[float], theirs: list[float]) -> str:
    return f"to {max(abs(a - b) for a, b in zip(losses, theirs, strict=True)):.0e}"


if __name__ == "__main__":
    main()
