"""The paper's tables on the hosts' real engines, with 4, 6 and 8 ranks, measured on emulated devices.

Tiny layers compute in the real models' shares of the FLOPs, and every operation sleeps as long as a slow device would
compute. Order, communication and waiting are the engine's; durations are emulated, and no figure applies to a GPU.
In each cell the host trains alone, then with freezing, in the same processes.

Writes results/paper/tables.json and .png, cell by cell, and the table into docs/paper_tables.md. Measured
cells are not run again. The whole table takes about 30 minutes on 2 cores.
"""

from __future__ import annotations

import fnmatch
import functools
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.paper.cells import HOSTS, SCHEDULES, TWO_STAGES, Cell, all_cells
from benchmarks.paper.models import forward_flops
from benchmarks.paper.predicting import gain
from benchmarks.paper.trainings import setup, start
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.paired import PairedSettings, timed_step
from tf_adapters.testing.ranks import RanksFailed

RESULTS = result_file("paper/tables.json")
PICTURE = RESULTS.with_suffix(".png")
PAGE = ROOT / "docs" / "paper_tables.md"
FORWARD_S = 0.035
"""How long a forward of one microbatch takes on a rank of a model that is cut evenly."""

SLOWER = {"deepspeed 8B gpipe 4": 3.0, "deepspeed 8B 1f1b 4": 3.0}
"""Cells whose operations take that many times as long: what the host computes in Python is then a smaller share."""

ALONE, SETTLE = 5, 1
PHASES = {"warmup": 2, "monitoring": 10, "progressive": 0, "stable": 6}
SETTINGS: dict[str, Any] = {"stability_check_interval": 3}
HEADINGS = (
    *("host", "model", "schedule", "ranks", "paper", "planned", "measured", "off the paper"),
    *("measured step / planned", "stable: planned", "stable: measured", "freeze ratio: planned", "paper"),
)
Row = Mapping[str, Any]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--cells", nargs="+", default=["*"], metavar="PATTERN", help="names of cells with *, such as 'torch 8B * 4'"
    )
    parser.add_argument("--again", action="store_true", help="run cells that are there, too")
    parser.add_argument("--list", action="store_true", help="print the names of the cells, and whether they are there")
    args = parser.parse_args()
    cells = [cell for cell in all_cells() if any(fnmatch.fnmatch(str(cell), pattern) for pattern in args.cells)]
    if not cells:
        parser.error(f"--cells {' '.join(args.cells)}: no cell has such a name; --list prints them")
    rows = read_rows()
    if args.list:
        print("\n".join(f"{cell!s:40} {'measured' if str(cell) in rows else ''}".rstrip() for cell in cells))
        return
    failed = measure([cell for cell in cells if args.again or str(cell) not in rows])
    rows = read_rows()
    if rows:
        draw(rows)
        put_table(PAGE, "paper_tables", generated(rows))
        print(table(rows))
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


def read_rows() -> dict[str, Any]:
    """The measured cells by name."""
    return read_part(RESULTS, "cells")


def keep(cell: Cell, row: Row) -> None:
    """Replace the figures of a cell."""
    hosts = [cell.host, *(name.split()[0] for name in read_rows())]
    packages = [host for host in ("deepspeed", "megatron-core") if host in hosts]
    order = map(str, all_cells())
    record = {"machine": machine(*packages), "device": "emulated", "phases": PHASES}
    keep_row(RESULTS, "cells", {str(cell): row}, order, **record)


# --- measuring -------------------------------------------------------------------------------------------------


def measure(cells: Iterable[Cell]) -> list[str]:
    """Run cells, those that can share their processes one after the other; the names of those that failed."""
    pools: dict[tuple[str, int, bool], list[Cell]] = {}
    for cell in cells:  # Megatron's groups are made once in a process
        virtual = cell.host == "megatron-core" and cell.schedule in TWO_STAGES
        pools.setdefault((cell.host, cell.ranks, virtual), []).append(cell)
    failed = []
    for (host, ranks, _), together in pools.items():
        with RankPool(ranks, functools.partial(setup, host)) as pool:
            for cell in together:
                began = time.perf_counter()
                try:
                    of_ranks = pool.run(run_cell, cell, timeout_s=300)
                except RanksFailed as error:
                    failed.append(str(cell))
                    print(f"{cell}: failed\n{error}", flush=True)
                    continue
                errors = [of_rank["emulation_error"] for of_rank in of_ranks]
                row = {**of_ranks[0], "emulation_error": max(errors), "seconds": time.perf_counter() - began}
                keep(cell, row)
                print(cell, {name: round(value, 4) for name, value in row.items()}, flush=True)
    return failed


def forward_s(cell: Cell) -> float:
    return FORWARD_S * SLOWER.get(str(cell), 1.0)


def run_cell(cell: Cell) -> dict[str, float]:
    """The host's step alone, and with freezing beside the plan's, in ms. Called on all ranks at once."""
    freezing = PairedSettings(
        **PHASES,
        max_freeze_ratio=cell.of.max_freeze_ratio,
        output_dir=f"runs/bench/paper_tables/{cell}",
        settings={**SETTINGS, "method": cell.method},
    )
    with EmulatedDevice(forward_flops(cell.of) / (forward_s(cell) * cell.ranks), real_time=True) as device:
        alone = start(cell, None)
        unfrozen = [timed_step(alone.step) for _ in range(ALONE)]
        if alone.adapter is not None:
            alone.adapter.detach()
        training = start(cell, freezing.section())
        controller = training.adapter.controller
        stable = []
        while len(stable) < PHASES["stable"]:
            phase = controller.phase.value
            ms = timed_step(training.step)
            stable += [ms] if phase == "stable" else []
        plan, forecast = controller.state.plan, controller.forecast
        training.adapter.detach()
    if cell.host == "megatron-core":
        import tf_adapters.megatron

        tf_adapters.megatron.revert()
    makespans = plan.makespan_ms
    return {
        "unfrozen_ms": statistics.median(unfrozen[SETTLE:]),
        "stable_ms": statistics.median(stable[SETTLE:]),
        "forecast_unfrozen_ms": forecast.unfrozen_ms,
        "planned_ms": forecast.planned_ms,
        "fully_frozen": makespans.fully_frozen / makespans.unfrozen,
        "freeze_ratio": plan.mean_freeze_ratio,
        "emulation_error": device.error,
        "forward_s": forward_s(cell),
    }


# --- showing ---------------------------------------------------------------------------------------------------


def over_run(cell: Cell, stable: float, fully_frozen: float) -> float:
    """The gain in % over all steps of the paper's run, from steps as shares of an unfrozen one.

    The paper's phases: nothing frozen until half of monitoring, everything in its other half, then a ramp.
    """
    phases, steps = cell.of.phases, cell.of.steps
    everything = phases.monitoring_end - phases.upper_end
    ramp = phases.progressive_end - phases.monitoring_end
    mean = phases.upper_end + everything * fully_frozen + ramp * (1.0 + stable) / 2.0
    return gain(1.0, (mean + (steps - phases.progressive_end) * stable) / steps)


def figures(cell: Cell, row: Row) -> dict[str, float | None]:
    """A cell's gains in throughput, in %: the paper's, planned and measured, the last two over the paper's run too."""
    planned = row["planned_ms"] / row["forecast_unfrozen_ms"]
    measured = row["stable_ms"] / row["unfrozen_ms"]
    return {
        "paper": cell.paper[0] if cell.paper else None,
        "planned": over_run(cell, planned, row["fully_frozen"]),
        "measured": over_run(cell, measured, row["fully_frozen"]),
        "stable planned": gain(1.0, planned),
        "stable measured": gain(1.0, measured),
    }


def table(rows: Mapping[str, Row]) -> str:
    """All measured cells."""
    cells = [cell for cell in all_cells() if str(cell) in rows]
    return markdown_table(HEADINGS, [_cells_of(cell, rows[str(cell)]) for cell in cells])


def _cells_of(cell: Cell, row: Row) -> list[str]:
    of_cell = figures(cell, row)
    paper, measured = of_cell["paper"], of_cell["measured"]
    assert measured is not None
    more = [cell.partition and f"by {cell.partition}", "" if cell.method == "timely" else cell.method]
    return [
        HOSTS[cell.host],
        ", ".join([cell.of.name, *(word for word in more if word)]),
        SCHEDULES[cell.schedule],
        str(cell.ranks),
        *(_percent(of_cell[name]) for name in ("paper", "planned", "measured")),
        "-" if paper is None else f"{measured - paper:+.1f}",
        f"{row['stable_ms'] / row['planned_ms']:.3f}",
        *(_percent(of_cell[name]) for name in ("stable planned", "stable measured")),
        f"{row['freeze_ratio']:.2f}",
        "-" if cell.paper is None else f"{cell.paper[1] / 100.0:.2f}",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


def generated(rows: Mapping[str, Row]) -> str:
    """Return the generated part of the page: the table, its accuracy, the picture."""
    off = [abs(row["stable_ms"] / row["planned_ms"] - 1.0) for row in rows.values()]
    errors = [row["emulation_error"] for row in rows.values()]
    return (
        f"{table(rows)}\n\n"
        f"{len(rows)} of {len(all_cells())} cells. A measured step is {statistics.median(off):.1%} off the planned "
        f"one in the median, {max(off):.1%} at most; the emulation is off by {max(errors):.1%} of its times at most. "
        f"Measuring took {sum(row['seconds'] for row in rows.values()) / 60.0:.0f} minutes.\n\n"
        f"![Emulated devices: gains over the paper's run](../benchmarks/results/paper/{PICTURE.name})"
    )


def draw(rows: Mapping[str, Row]) -> None:
    """Grouped bars of all measured cells: paper, planned, measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    of_hosts = {host: [c for c in all_cells() if c.host == host and str(c) in rows] for host in HOSTS}
    of_hosts = {host: cells for host, cells in of_hosts.items() if cells}
    figure = Figure(figsize=(14, 4.2 * len(of_hosts)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Emulated devices, the hosts' real engines: gain in throughput over the paper's run, in %")
    colours = {"paper": "#9aa0a6", "planned": "#386bb8", "measured": "#c8781a"}
    for axes, (host, cells) in zip(figure.subplots(len(of_hosts), squeeze=False)[:, 0], of_hosts.items(), strict=True):
        for place, (name, colour) in enumerate(colours.items()):
            heights = [figures(cell, rows[str(cell)])[name] or 0.0 for cell in cells]
            axes.bar([x + 0.27 * (place - 1) for x in range(len(cells))], heights, 0.27, color=colour, label=name)
        axes.set_xticks(range(len(cells)), [_label(cell) for cell in cells], rotation=90, fontsize=8)
        axes.set_title(f"{HOSTS[host]} (emulated devices)", fontsize=10)
        axes.grid(axis="y", alpha=0.3)
        axes.set_ylim(top=1.2 * axes.get_ylim()[1])
        axes.legend(loc="upper right", ncols=3, fontsize=8)
    figure.savefig(PICTURE, format="png")


def _label(cell: Cell) -> str:
    method = "" if cell.method == "timely" else cell.method
    words = (cell.model, cell.partition, SCHEDULES[cell.schedule], method, f"{cell.ranks} ranks")
    return " ".join(word for word in words if word)


if __name__ == "__main__":
    main()
