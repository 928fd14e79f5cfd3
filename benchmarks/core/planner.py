"""The planner at scale: seconds and memory against the number of actions, for four ways to solve one program.

ours        tf_adapters.planner.plan: schedule, solve and proof.
glop        the whole sparse program in one GLOP call (the end, plus a small price on freezing).
highs       the same in HiGHS's interior point method, by scipy.
dense       the same with dense rows, as a first attempt would write it, in HiGHS.

Each solve is a process of its own, so that its memory is its own. A way of solving leaves the race at the first size
that takes it longer than the limit, or more than 12 GiB. Prints a table, writes results/core/planner.json and draws
results/core/planner.png.

`--wide`: ours only, every order on 64 stages with 34,288 to 65,536 actions, with noisy times and with equal ones;
writes results/core/planner_wide.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, result_file, write_json
from benchmarks.shared.measuring import machine
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.schedule.orders import named_schedule

MAX_FREEZE_RATIO = 0.8
PRICE = 2e-4  # of all freezing that the budgets allow, in unfrozen makespans: the same in every one-call program
SCHEDULES = {
    "1f1b": ("one_f_one_b", 1),
    "interleaved": ("interleaved", 2),
    "zero bubble": ("interleaved_zero_bubble", 2),
}
WIDE = {  # 64 stages: the name of torch_pipelining.named, ranks, microbatches
    "1f1b": ("one_f_one_b", 64, 512),
    "gpipe": ("gpipe", 64, 512),
    "interleaved": ("interleaved", 32, 512),
    "looped bfs": ("looped_bfs", 32, 512),
    "zero bubble": ("interleaved_zero_bubble", 32, 320),
    "zbv": ("zbv", 32, 340),
    "dualpipev": ("dualpipev", 32, 256),
}
TIMES = ("noisy", "equal")
SIZES = (64, 256, 1024, 4096, 16384, 65536)
WAYS = ("ours", "glop", "highs", "dense")
MOST_GIB = 12


@dataclass(frozen=True)
class Solve:
    """One solve: seconds, peak MiB of its process above an idle one, makespan in ms, proven gap (ours only), times."""

    way: str
    schedule: str
    actions: int
    seconds: float
    mebibytes: float
    makespan_ms: float
    gap: float | None
    times: str


def main() -> None:
    args = parse_args()
    if args.one:
        way, schedule, size = args.one
        print(json.dumps(asdict(one(way, schedule, pipeline(schedule, int(size))))))
        return
    if args.one_wide:
        schedule, times = args.one_wide
        print(json.dumps(asdict(one("ours", schedule, named_schedule(*WIDE[schedule]), times))))
        return
    if args.wide:
        wide(args.limit_s)
        return
    solves: list[Solve] = []
    print(f"{'schedule':<12}{'way':<8}{'actions':>8}{'seconds':>10}{'MiB':>8}{'gap':>10}", flush=True)
    for schedule in args.schedules:
        for way in args.ways:
            solves += race(way, schedule, args.sizes, args.limit_s)
    exponents = {
        f"{way}, {schedule}": exponent(solves, way, schedule) for schedule in args.schedules for way in args.ways
    }
    for name, value in exponents.items():
        print(f"growth of time, {name}: actions^{value:.2f}" if value else f"growth of time, {name}: too few sizes")
    record = {"machine": machine("scipy"), "limit_s": args.limit_s, "time_grows_as_actions_to_the": exponents}
    write_json(result_file("core/planner.json"), {**record, "solves": [asdict(s) for s in solves]})
    draw(solves, result_file("core/planner.png"))


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="actions, about")
    parser.add_argument("--limit-s", type=float, default=75.0, help="seconds that one process may take")
    parser.add_argument("--wide", action="store_true", help="every order on 64 stages, in the place of the race")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "SCHEDULE", "SIZE"), help="one solve, as JSON")
    parser.add_argument("--one-wide", nargs=2, metavar=("SCHEDULE", "TIMES"), help="one solve on 64 stages, as JSON")
    return parser.parse_args()


def race(way: str, schedule: str, sizes: list[int], limit_s: float) -> list[Solve]:
    """One way through the sizes, until it is out of time or memory."""
    finished = []
    for size in sizes:
        solve = of_process(["--one", way, schedule, str(size)], limit_s)
        if solve is None:
            break
        finished.append(solve)
    return finished


def wide(limit_s: float) -> None:
    """Every order of ``WIDE`` with equal and with noisy times, printed and written."""
    cells = [of_process(["--one-wide", schedule, times], limit_s) for schedule in WIDE for times in TIMES]
    record = {"machine": machine("scipy"), "limit_s": limit_s, "solves": [asdict(cell) for cell in cells if cell]}
    write_json(result_file("core/planner_wide.json"), record)


def of_process(arguments: list[str], limit_s: float) -> Solve | None:
    """Run this command with ``arguments`` in a new process; on failure print the reason and return None."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.core.planner", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        print(f"{' '.join(arguments[1:])}  {why(error, limit_s)}", flush=True)
        return None
    solve = Solve(**json.loads(done.stdout.splitlines()[-1]))
    gap = "-" if solve.gap is None else f"{solve.gap:.1e}"
    print(
        f"{solve.schedule:<12}{solve.way:<8}{solve.actions:>8}{solve.seconds:>10.2f}{solve.mebibytes:>8.0f}{gap:>10}"
        f"  {solve.times}",
        flush=True,
    )
    return solve


def why(error: Exception, limit_s: float) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"over {limit_s:g} s"
    assert isinstance(error, subprocess.CalledProcessError)
    return f"failed: {(error.stderr.strip().splitlines() or [f'exit status {error.returncode}'])[-1]}"


def one(way: str, schedule: str, order: PipelineSchedule, times: str = TIMES[0]) -> Solve:
    """Solve in this process, which may take ``MOST_GIB``."""
    resource.setrlimit(resource.RLIMIT_AS, (int(MOST_GIB * 2**30), int(MOST_GIB * 2**30)))
    make = {"noisy": noisy_times, "equal": equal_times}[times]
    durations = make(order)
    solver = {"ours": ours, "glop": glop, "highs": highs, "dense": dense}[way]
    solver(pipeline("1f1b", 64), make(pipeline("1f1b", 64)))  # the solver's code is no part of a solve
    idle = peak_mebibytes()
    began = time.perf_counter()
    makespan, gap = solver(order, durations)
    seconds = time.perf_counter() - began
    return Solve(
        way=way,
        schedule=schedule,
        actions=len(order.actions),
        seconds=seconds,
        mebibytes=peak_mebibytes() - idle,
        makespan_ms=makespan,
        gap=gap,
        times=times,
    )


def pipeline(schedule: str, size: int) -> PipelineSchedule:
    """A schedule of about ``size`` actions: up to 32 stages, then more microbatches."""
    name, per_rank = SCHEDULES[schedule]
    kinds = 3 if name == "interleaved_zero_bubble" else 2
    stages = min(32, max(4, 2 ** round(np.log2(np.sqrt(size / kinds)) - 1)))
    ranks = stages // per_rank
    microbatches = max(1, round(size / kinds / stages / ranks)) * ranks
    return named_schedule(name, ranks, microbatches)


def noisy_times(order: PipelineSchedule) -> dict[Action, tuple[float, float]]:
    """Stages that differ by up to 20%, microbatches by some 3%: what monitoring measures."""
    random = np.random.default_rng(0)
    stage = random.uniform(0.8, 1.2, order.num_stages)
    times = {}
    for action in order.actions:
        whole = (20.0 if action.kind.value == "B" else 10.0) * stage[action.stage] * random.normal(1.0, 0.03)
        times[action] = (whole * (0.0 if action.kind.value == "W" else 0.5) if action.freezable else whole, whole)
    return times


def equal_times(order: PipelineSchedule) -> dict[Action, tuple[float, float]]:
    """Forwards of 10 ms and backwards of 20, half of which is weight gradients."""
    whole = {action: 20.0 if action.kind.value == "B" else 10.0 for action in order.actions}
    return {
        action: (ms * (0.0 if action.kind.value == "W" else 0.5) if action.freezable else ms, ms)
        for action, ms in whole.items()
    }


Times = dict[Action, tuple[float, float]]


def ours(order: PipelineSchedule, times: Times) -> tuple[float, float]:
    made = plan(order, times, MAX_FREEZE_RATIO)
    return made.makespan_ms.planned, made.solver.optimality_gap


@dataclass(frozen=True)
class Program:
    """``min cost x`` with ``rows x >= least`` and ``low <= x <= high``: the paper's program, sparse."""

    cost: NDArray[np.float64]
    rows: sparse.csr_array
    least: NDArray[np.float64]
    high: NDArray[np.float64]
    end: int

    @classmethod
    def of(cls, order: PipelineSchedule, times: Times) -> Program:
        dag = PipelineDag.from_schedule(order)
        actions = len(dag.actions)
        upper = np.array([times[action][1] for action in dag.actions])
        saved = upper - np.array([times[action][0] for action in dag.actions])
        freezable = [position for position, action in enumerate(dag.actions) if action.freezable]
        column = {position: actions + 1 + number for number, position in enumerate(freezable)}
        last = np.setdiff1d(np.arange(actions), dag.edges.sources)
        pairs = [*zip(dag.edges.sources, dag.edges.targets, strict=True), *((source, actions) for source in last)]
        entries, least = [], []
        for row, (source, target) in enumerate(pairs):
            entries += [(row, target, 1.0), (row, source, -1.0)]
            entries += [(row, column[source], saved[source])] if source in column else []
            least.append(upper[source])
        stages = sorted({dag.actions[position].stage for position in freezable})
        budget = dict.fromkeys(stages, 0.0)
        for position in freezable:
            stage = dag.actions[position].stage
            entries.append((len(pairs) + stages.index(stage), column[position], -1.0))
            budget[stage] += MAX_FREEZE_RATIO
        row, col, value = (np.array(part) for part in zip(*entries, strict=True))
        size = actions + 1 + len(freezable)
        high = np.full(size, np.inf)
        high[actions + 1 :] = 1.0
        cost = np.zeros(size)
        cost[actions] = 1.0
        cost[actions + 1 :] = PRICE * dag.end(upper) / sum(budget.values())
        rows = sparse.csr_array((value, (row, col)), (len(pairs) + len(stages), size))
        least += [-budget[stage] for stage in stages]
        return cls(cost=cost, rows=rows, least=np.array(least), high=high, end=actions)


def glop(order: PipelineSchedule, times: Times) -> tuple[float, None]:
    from ortools.linear_solver import pywraplp

    program = Program.of(order, times)
    solver: Any = pywraplp.Solver.CreateSolver("GLOP")
    x = [solver.NumVar(0.0, float(high), "") for high in program.high]
    for row, least in enumerate(program.least):
        constraint = solver.Constraint(float(least), solver.infinity())
        for entry in range(program.rows.indptr[row], program.rows.indptr[row + 1]):
            constraint.SetCoefficient(x[program.rows.indices[entry]], float(program.rows.data[entry]))
    for variable, cost in zip(x, program.cost, strict=True):
        solver.Objective().SetCoefficient(variable, float(cost))
    solver.SetSolverSpecificParametersAsString("use_dual_simplex:true")
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise RuntimeError("GLOP did not end OPTIMAL")
    return x[program.end].solution_value(), None


def highs(order: PipelineSchedule, times: Times) -> tuple[float, None]:
    return by_scipy(Program.of(order, times), lambda rows: rows)


def dense(order: PipelineSchedule, times: Times) -> tuple[float, None]:
    return by_scipy(Program.of(order, times), lambda rows: rows.toarray())


def by_scipy(program: Program, form: Callable[[Any], Any]) -> tuple[float, None]:
    from scipy.optimize import linprog

    bounds = np.stack([np.zeros_like(program.high), program.high], axis=1)
    found = linprog(program.cost, -form(program.rows), -program.least, bounds=bounds, method="highs-ipm")
    if found.status != 0:
        raise RuntimeError(f"HiGHS: {found.message}")
    return float(found.x[program.end]), None


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def exponent(solves: list[Solve], way: str, schedule: str) -> float | None:
    """b of seconds ~ actions^b, by least squares over the sizes that take a tenth of a second or more."""
    points = [(s.actions, s.seconds) for s in solves if (s.way, s.schedule) == (way, schedule) and s.seconds >= 0.1]
    if len(points) < 2:
        return None
    actions, seconds = np.log(np.array(points)).T
    return float(np.polyfit(actions, seconds, 1)[0])


def draw(solves: list[Solve], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for panel, field, label in zip(panels, ("seconds", "mebibytes"), ("seconds", "peak MiB of the solve"), strict=True):
        for colour, way in zip(("#0072b2", "#d55e00", "#009e73", "#999999"), WAYS, strict=True):
            for style, schedule in zip(("-", "--", ":"), SCHEDULES, strict=True):
                points = [s for s in solves if (s.way, s.schedule) == (way, schedule)]
                if points:
                    values = [max(getattr(s, field), 1e-3 if field == "seconds" else 1.0) for s in points]
                    name = f"{way}, {schedule}"
                    panel.plot([s.actions for s in points], values, style, color=colour, marker="o", ms=3, label=name)
        panel.set(xscale="log", yscale="log", xlabel="actions", ylabel=label)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
