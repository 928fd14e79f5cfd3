"""Uneven pipelines on the hosts' real engines, measured on emulated devices: a slow stage, a slow link, a slow replica.

1F1B, 8 microbatches, tiny layers; operations sleep as long as a slow device would compute, messages arrive no earlier
than over a link of that speed. Durations are emulated, and no figure says anything about a GPU. The plan from
measured times is compared with a plan for equal stages and links. The times of that plan are means over stages and
links, and its limits are the same.

Writes results/hosts/imbalance.json, case by case, and the table into docs/paper_tables.md.
"""

from __future__ import annotations

import fnmatch
import functools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import HOSTS, Size, Training, setup, start
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.report import Report
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action
from tf_adapters.testing import RankPool, force_plan
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.emulated_link import EmulatedLinks, Link
from tf_adapters.testing.paired import PairedSettings, timed_step

RESULTS = result_file("hosts/imbalance.json")
PAGE = ROOT / "docs" / "paper_tables.md"
RATE = 5e8
"""FLOP/s, at which a forward of a stage takes about 50 ms; DeepSpeed's, of twice as many rows, about 100."""
LINK, SLOW_LINK = Link(0.5, 5e6), Link(5.0, 5e5)
"""A microbatch's hidden states, 12 kB, are under way for 3 and for 30 ms; DeepSpeed's for 5 and for 54."""
SLOWER = 1.5

ALONE, SETTLE = 7, 2
PHASES = {"warmup": 2, "monitoring": 12, "progressive": 0, "stable": 7}


@dataclass(frozen=True)
class Case:
    """An uneven pipeline. ``slower``: by rank, how many times as long its operations take."""

    name: str
    host: str
    slower: Mapping[int, float] = field(default_factory=dict)
    slow_edge: tuple[int, int] | None = None
    replicas: int = 1

    @property
    def size(self) -> Size:
        ranks = 4 // self.replicas
        return Size(ranks=ranks, replicas=self.replicas, layers=2 * ranks, width=96, context=16, micro_batch=2)


CASES = (
    *(Case("second of four stages 1.5 times as long", host, slower={1: SLOWER}) for host in HOSTS),
    *(Case("link between the second and the third stage ten times as slow", host, slow_edge=(1, 2)) for host in HOSTS),
    Case("second of two stages 1.5 times as long on one of two replicas", "deepspeed", slower={3: SLOWER}, replicas=2),
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--cases", nargs="+", default=["*"], metavar="PATTERN", help="names of cases with *, such as 'torch: *'"
    )
    parser.add_argument("--again", action="store_true", help="run cases that are there, too")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and whether they are there")
    args = parser.parse_args()
    cases = [case for case in CASES if any(fnmatch.fnmatch(key(case), pattern) for pattern in args.cases)]
    if not cases:
        parser.error(f"--cases {' '.join(args.cases)}: no case has such a name; --list prints them")
    if args.list:
        print("\n".join(f"{key(case):90}{'measured' if key(case) in read_rows() else ''}".rstrip() for case in cases))
        return
    for case in cases:
        if args.again or key(case) not in read_rows():
            row = measure(case)
            keep(case, row)
            print(key(case), row, flush=True)
    put_table(PAGE, "imbalance", table(read_rows()))
    print(table(read_rows()))


def key(case: Case) -> str:
    return f"{case.host}: {case.name}"


def read_rows() -> dict[str, Any]:
    return read_part(RESULTS, "cases")


def keep(case: Case, row: Mapping[str, Any]) -> None:
    emulation = {"device": "emulated", "rate": RATE, "phases": PHASES}
    keep_row(RESULTS, "cases", {key(case): row}, map(key, CASES), machine=machine(*HOSTS), **emulation)


# --- measuring -------------------------------------------------------------------------------------------------


def measure(case: Case) -> dict[str, Any]:
    with RankPool(4, functools.partial(setup, case.host)) as ranks:
        of_ranks = ranks.run(run_case, case, timeout_s=600)
    return {**of_ranks[0], "emulation_error": max(of_rank["emulation_error"] for of_rank in of_ranks)}


@contextmanager
def emulation(case: Case) -> Iterator[EmulatedDevice]:
    """This rank's device and its links. Messages are emulated where a link is slow."""
    with ExitStack() as stack:
        if case.slow_edge is not None:
            stack.enter_context(EmulatedLinks(LINK, {case.slow_edge: SLOW_LINK}))
        yield stack.enter_context(EmulatedDevice(RATE / case.slower.get(dist.get_rank(), 1.0)))


def run_case(case: Case) -> dict[str, float]:
    """Steps of the host alone, of the plan and of the one for equal stages, in ms. Called on all ranks at once."""
    section = {"monitoring_precision": 0.02, "replan_threshold": 0.0}
    folder = f"runs/bench/imbalance/{key(case)}"
    freezing = PairedSettings(**PHASES, output_dir=folder, settings=section)
    with emulation(case) as device:
        alone = start(case.host, freezing, alone=True, size=case.size)
        unfrozen = [timed_step(alone.step) for _ in range(ALONE)]
        training = start(case.host, freezing, size=case.size)
        controller = training.adapter.controller
        while controller.phase.value != "stable":
            training.step()
        measured = stable_steps(training)
        made, forecast = controller.state.plan, controller.forecast
        even = []
        for freeze_ratio, mean in even_plans(controller.report_path, made.mean_freeze_ratio):
            force_plan(controller, freeze_ratio)
            even.append((stable_steps(training), mean))
        training.detach()
    return {
        "unfrozen_ms": statistics.median(unfrozen[SETTLE:]),
        "planned_ms": forecast.planned_ms,
        "stable_ms": measured,
        "freeze_ratio": made.mean_freeze_ratio,
        "even_ms": even[0][0],
        "even_freeze_ratio": even[0][1],
        "even_as_little_ms": even[1][0],
        "even_as_little_freeze_ratio": even[1][1],
        "emulation_error": device.error,
    }


def stable_steps(training: Training) -> float:
    times = [timed_step(training.step) for _ in range(PHASES["stable"])]
    return statistics.median(times[SETTLE:])


def even_plans(report_path: Path, mean: float) -> list[tuple[dict[str, float], float]]:
    """Freeze ratios and their mean: the plan for stages and links that are alike, and the one that freezes ``mean``.

    Made on one rank. Called on all ranks at once.
    """
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        problem = evened(Report.read(report_path))
        made = solve(problem), as_little(problem, mean)
        told = [[(plan.to_json()["freeze_ratio"], plan.mean_freeze_ratio) for plan in made]]
    dist.broadcast_object_list(told, src=0)
    plans: list[tuple[dict[str, float], float]] = told[0]
    return plans


def as_little(problem: PlanProblem, mean: float) -> FreezePlan:
    """The plan whose mean freeze ratio is nearest below ``mean``: of plans for later ends of the batch."""
    made = solve(problem)
    early, late = made.makespan_ms.planned, made.makespan_ms.unfrozen
    if made.mean_freeze_ratio <= mean:
        return made
    for _ in range(12):
        target = (early + late) / 2.0
        made = solve(_aimed(problem, target))
        early, late = (target, late) if made.mean_freeze_ratio > mean else (early, target)
    return solve(_aimed(problem, late))


def evened(report: Report) -> PlanProblem:
    """Return the problem of a run's plan, with each time replaced by its mean over the stages."""
    known = report.measurement
    mean = means({action: (of.lower + of.upper) / 2.0 for action, of in known.times.items()})
    half = means({action: (of.upper - of.lower) / 2.0 for action, of in known.times.items()})
    transfer = statistics.fmean(known.communication.values()) if known.communication else 0.0
    evened = Measurement(
        known.schedule,
        {action: Bounds(mean[action] - half[action], mean[action] + half[action]) for action in known.times},
        communication=dict.fromkeys(known.communication, transfer),
        overhead=means(known.overhead),
    )
    return PlanProblem(evened, Limits.of_training(float(report.config["max_freeze_ratio"])))


def _aimed(problem: PlanProblem, target_ms: float) -> PlanProblem:
    return replace(problem, limits=replace(problem.limits, target_makespan_ms=target_ms))


def means(values: Mapping[Action, float]) -> dict[Action, float]:
    """By action, the mean over all stages' actions of its kind."""
    of_kind: dict[Any, list[float]] = defaultdict(list)
    for action, value in values.items():
        of_kind[action.kind].append(value)
    return {action: statistics.fmean(of_kind[action.kind]) for action in values}


# --- showing ---------------------------------------------------------------------------------------------------


def table(rows: Mapping[str, Any]) -> str:
    head = (
        *("host", "uneven", "plan of what was measured", "measured step / planned"),
        *("plan for equal stages", "the same, freezing as little", "emulation off by"),
    )
    return markdown_table(head, [_cells(case, rows[key(case)]) for case in CASES if key(case) in rows])


def _cells(case: Case, row: Mapping[str, float]) -> list[str]:
    def speedup(step: str, freeze_ratio: str) -> str:
        return f"{row['unfrozen_ms'] / row[step]:.3f}x, {row[freeze_ratio]:.2f} frozen"

    return [
        HOSTS[case.host],
        case.name,
        speedup("stable_ms", "freeze_ratio"),
        f"{row['stable_ms'] / row['planned_ms']:.3f}",
        speedup("even_ms", "even_freeze_ratio"),
        speedup("even_as_little_ms", "even_as_little_freeze_ratio"),
        f"{row['emulation_error']:.1%}",
    ]


if __name__ == "__main__":
    main()
