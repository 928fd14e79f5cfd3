"""The accuracy study: six methods on real data, two pipeline ranks on this machine's CPU, one thread each.

    python -m benchmarks.accuracy.study                  # the study. The same command continues a stopped one.
    python -m benchmarks.accuracy.study --quick          # every part in a minute or two; its figures mean nothing.
    python -m benchmarks.accuracy.study --sensitivity    # r_max, T_APF and P_Auto, on vit under 1F1B.
    python -m benchmarks.accuracy.study --summary        # print tables of finished runs and draw; train nothing.

Each finished run is a line of results/accuracy/study.jsonl; tables and pictures are in the same folder.
docs/accuracy.md explains the measurements.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.accuracy.cells import METHODS, SCHEDULES, Cell, append, grid, missing, read_records, sensitivity_grid
from benchmarks.accuracy.table import markdown, table, verdict_table
from benchmarks.accuracy.tasks import TASKS, Task
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, put_table, result_file
from benchmarks.shared.measuring import machine
from tf_adapters.testing import RankPool

RESULTS = result_file("accuracy")
QUICK = {
    "steps": 12, "microbatches": 2, "micro_batch": 2, "warmup": 2, "monitoring": 4, "progressive": 2,
    "check_every": 2, "eval_every": 6, "pair_every": 1, "probe_every": 4, "held_out": 16,
}  # fmt: skip
RUN_LIMIT_S = 7200.0
STUDIED = ("text", "vit", "convnext")
"""With all methods; other tasks only where ``--tasks`` names them."""


def main() -> None:
    args = parse_args()
    tasks = {name: shortened(TASKS[name], args) for name in TASKS}
    if not args.summary:
        run(cells_of(args), tasks, args)
    records = read_records(args.results)
    if not records:
        raise SystemExit(f"{args.results}: no finished run yet")
    text = f"{heading(records)}\n\n{table(records)}\n\nNext to no freezing\n\n{verdict_table(records)}\n"
    print(text)
    args.results.with_suffix(".txt").write_text(text)
    if args.results == RESULTS / "study.jsonl":
        put_table(ROOT / "docs" / "accuracy.md", "accuracy", markdown(records))
    if not args.no_pictures:
        from benchmarks.accuracy.plots import draw

        for path in draw(records, args.results.with_suffix("")):
            print(f"picture: {path}")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, with what --quick and --sensitivity leave out filled in."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="none: the host alone")
    parser.add_argument("--seeds", type=int, help="number of them, from 0 (default: 3)")
    parser.add_argument("--steps", type=int, help="of each run, instead of the task's own number")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings: rows of their own")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, into runs/accuracy")
    parser.add_argument("--sensitivity", action="store_true", help="vary r_max, T_APF and P_Auto instead")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="keep what is finished")
    parser.add_argument("--results", type=Path, help="the file of finished runs")
    parser.add_argument("--no-pictures", action="store_true")
    args = parser.parse_args(arguments)
    args.tasks = args.tasks or (["vit"] if args.sensitivity else list(STUDIED))
    args.schedules = args.schedules or (["1f1b"] if args.sensitivity or args.quick else list(SCHEDULES))
    args.seeds = args.seeds or (1 if args.quick else 3)
    args.settings = dict(setting(text) for text in args.set)
    if args.results is None:
        name = "sensitivity.jsonl" if args.sensitivity else "study.jsonl"
        args.results = Path("runs/accuracy/quick", name) if args.quick else RESULTS / name
    return args


def setting(text: str) -> tuple[str, Any]:
    """A setting and its value, which is JSON or else a text: ``gradient_scale=computed_mean``."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def shortened(task: Task, args: argparse.Namespace) -> Task:
    """The task with the lengths that the arguments ask for."""
    task = replace(task, **QUICK) if args.quick else task
    return replace(task, steps=args.steps) if args.steps else task


def cells_of(args: argparse.Namespace) -> list[Cell]:
    if args.sensitivity:
        return sensitivity_grid(args.tasks, args.schedules, args.seeds)
    return grid(args.tasks, args.schedules, args.methods, args.seeds, args.settings)


def run(cells: Sequence[Cell], tasks: dict[str, Task], args: argparse.Namespace) -> None:
    """Train what is missing, and keep each run as soon as it is finished."""
    from benchmarks.accuracy.pipeline import STAGES, setup
    from benchmarks.accuracy.training import train_cell

    if not args.resume:
        args.results.unlink(missing_ok=True)
    due = missing(cells, read_records(args.results), tasks)
    print(f"{len(cells) - len(due)} of {len(cells)} runs are finished: {args.results}", flush=True)
    where = machine()
    with RankPool(STAGES, setup) as ranks:
        for number, cell in enumerate(due, start=1):
            task, since = tasks[cell.task], time.perf_counter()
            folder = report_folder(args.results, cell)
            found = ranks.run(train_cell, cell, task, str(folder), timeout_s=RUN_LIMIT_S)[0]
            took = time.perf_counter() - since
            record = {"cell": asdict(cell), "task": asdict(task), "command": command(), "machine": where}
            append(args.results, rounded({**record, "wall_s": took, **found}))
            loss, accuracy = found["curve"][-1][1:]
            print(
                f"{number}/{len(due)} {' '.join(cell.group)} seed {cell.seed}: {found['steps']} steps in {took:.0f} s, "
                f"held-out loss {loss:.4f}, accuracy {accuracy:.4f}",
                flush=True,
            )


def report_folder(results: Path, cell: Cell) -> Path:
    """Where a run leaves its report: never among the committed results."""
    name = "_".join((*cell.group, str(cell.seed))).replace(" ", "_").replace("/", "_")
    return Path("runs/accuracy/reports", results.parent.name, results.stem, name)


def command() -> str:
    """This command, without the place of the checkout."""
    return shlex.join(["python", "-m", "benchmarks.accuracy.study", *sys.argv[1:]])


def rounded(value: Any) -> Any:
    """Five significant digits: a noisy machine has no more to say."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def heading(records: Sequence[dict[str, Any]]) -> str:
    """Where the figures come from."""
    seeds = sorted({record["cell"]["seed"] for record in records})
    commands = sorted({record["command"] for record in records})
    machines = sorted({json.dumps(record["machine"]) for record in records})
    return "\n".join(
        [*commands, *machines, f"seeds {seeds}, {sum(record['wall_s'] for record in records) / 3600:.1f} h"]
    )


if __name__ == "__main__":
    main()
