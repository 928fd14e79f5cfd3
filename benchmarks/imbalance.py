"""Uneven pipelines on the hosts' real engines, measured on emulated devices: a slow stage, a slow link, a slow replica.

1F1B, 8 microbatches, tiny layers; operations sleep as long as a slow device would compute, messages arrive no earlier
than over a link of that speed. Durations are emulated, and no figure says anything about a GPU. The plan that is made
of what was measured is set beside the plan that would be made if stages and links were alike: its times are the means
over them, its limits the same.

Writes results/imbalance.json beside this file, case by case, and the table into docs/paper_tables.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from measuring import machine, put_table
from trainings import HOSTS, ROOT, Size, Training, setup, start

from tf_adapters.planner.problem import PlanProblem, most_of_a_microbatch
from tf_adapters.planner.solve import solve
from tf_adapters.report import Report
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action
from tf_adapters.testing import RankPool, force_plan
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.emulated_link import EmulatedLinks, Link
from tf_adapters.testing.paired import Freezing, timed_step

RESULTS = Path(__file__).with_name("results") / "imbalance.json"
PAGE = ROOT / "docs" / "paper_tables.md"
RATE = 1e9
"""FLOP/s, at which a forward of a stage takes about 100 ms."""
LINK, SLOW_LINK = Link(1.0, 5e6), Link(10.0, 5e5)
"""A microbatch's hidden states, 25 kB, are under way for 6 and for 59 ms."""
SLOWER = 1.5

ALONE, SETTLE = 8, 2
PHASES = {"warmup": 2, "monitoring": 12, "progressive": 0, "stable": 8}


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
        return Size(ranks=ranks, replicas=self.replicas, layers=2 * ranks, width=192, context=16, micro_batch=2)


CASES = (
    *(Case("second of four stages 1.5 times as long", host, slower={1: SLOWER}) for host in HOSTS),
    *(Case("link between the second and the third stage ten times as slow", host, slow_edge=(1, 2)) for host in HOSTS),
    Case("second of two stages 1.5 times as long on one of two replicas", "deepspeed", slower={3: SLOWER}, replicas=2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--again", action="store_true", help="run cases that are there, too")
    args = parser.parse_args()
    for case in CASES:
        if case.host in args.hosts and (args.again or key(case) not in read_rows()):
            row = measure(case)
            keep(case, row)
            print(key(case), row, flush=True)
    put_table(PAGE, "imbalance", table(read_rows()))
    print(table(read_rows()))


def key(case: Case) -> str:
    return f"{case.host}: {case.name}"


def read_rows() -> dict[str, Any]:
    rows: dict[str, Any] = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
    return rows


def keep(case: Case, row: Mapping[str, Any]) -> None:
    rows = {**read_rows(), key(case): row}
    cases = {key(known): rows[key(known)] for known in CASES if key(known) in rows}
    record = {"machine": machine(*HOSTS), "device": "emulated", "rate": RATE, "phases": PHASES, "cases": cases}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


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
    freezing = Freezing(**PHASES, output_dir=folder, settings=section)
    with emulation(case) as device:
        alone = start(case.host, freezing, alone=True, size=case.size)
        unfrozen = [timed_step(alone.step) for _ in range(ALONE)]
        training = start(case.host, freezing, size=case.size)
        controller = training.adapter.controller
        while controller.phase.value != "stable":
            training.step()
        measured = stable_steps(training)
        made, forecast = controller.state.plan, controller.forecast
        even = even_plan(controller.report_path)
        force_plan(controller, even["freeze_ratio"])
        of_even = stable_steps(training)
        training.detach()
    return {
        "unfrozen_ms": statistics.median(unfrozen[SETTLE:]),
        "planned_ms": forecast.planned_ms,
        "stable_ms": measured,
        "freeze_ratio": made.mean_freeze_ratio,
        "even_ms": of_even,
        "even_freeze_ratio": even["mean_freeze_ratio"],
        "emulation_error": device.error,
    }


def stable_steps(training: Training) -> float:
    times = [timed_step(training.step) for _ in range(PHASES["stable"])]
    return statistics.median(times[SETTLE:])


def even_plan(report_path: Path) -> dict[str, Any]:
    """The plan for stages and links that are alike; made on one rank. Called on all ranks at once."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        made = solve(evened(Report.read(report_path)))
        told = [{"freeze_ratio": made.to_json()["freeze_ratio"], "mean_freeze_ratio": made.mean_freeze_ratio}]
    dist.broadcast_object_list(told, src=0)
    assert isinstance(told[0], dict)
    return told[0]


def evened(report: Report) -> PlanProblem:
    """What a run's plan was made from, with means over the stages in the place of every time."""
    schedule, gaps = report.schedule.parse(), report.gaps()
    times = {Action.parse(text): pair for text, pair in report.times.items()}
    limit = float(report.config["max_freeze_ratio"])
    mean = means({action: statistics.fmean(pair) for action, pair in times.items()})
    half = means({action: (pair[1] - pair[0]) / 2.0 for action, pair in times.items()})
    transfer = statistics.fmean(gaps.communication.values()) if gaps.communication else 0.0
    return PlanProblem(
        schedule,
        {action: Bounds(mean[action] - half[action], mean[action] + half[action]) for action in times},
        limit,
        communication=dict.fromkeys(gaps.communication, transfer),
        overhead=means(gaps.overhead),
        max_microbatch_freeze_ratio=most_of_a_microbatch(limit),
    )


def means(values: Mapping[Action, float]) -> dict[Action, float]:
    """By action, the mean over all stages' actions of its kind."""
    of_kind: dict[Any, list[float]] = defaultdict(list)
    for action, value in values.items():
        of_kind[action.kind].append(value)
    return {action: statistics.fmean(of_kind[action.kind]) for action in values}


# --- showing ---------------------------------------------------------------------------------------------------


def table(rows: Mapping[str, Any]) -> str:
    head = ("host", "uneven", "plan of what was measured", "measured step / planned", "plan for equal stages")
    lines: list[Sequence[str]] = [head, ["---"] * len(head)]
    lines += [_cells(case, rows[key(case)]) for case in CASES if key(case) in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(case: Case, row: Mapping[str, float]) -> list[str]:
    return [
        HOSTS[case.host],
        case.name,
        f"{row['unfrozen_ms'] / row['stable_ms']:.3f}x, {row['freeze_ratio']:.2f} frozen",
        f"{row['stable_ms'] / row['planned_ms']:.3f}",
        f"{row['unfrozen_ms'] / row['even_ms']:.3f}x, {row['even_freeze_ratio']:.2f} frozen",
    ]


if __name__ == "__main__":
    main()
