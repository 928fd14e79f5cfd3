"""Planned gain of deferred weight gradients, the table in docs/deferral.md, and the planner's time.

Equal stages, forward : input gradient : weight gradient = 1 : 1.2 : 1, 1F1B, no communication. Only the
planner's time is measured. Writes results/core/deferral.json and the table into the page.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import machine
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Kind
from tf_adapters.schedule.orders import one_forward_one_backward

RESULTS = result_file("core/deferral.json")
PAGE = ROOT / "docs" / "deferral.md"
TIMES = {Kind.FORWARD: Bounds(1.0, 1.0), Kind.BACKWARD: Bounds(1.2, 2.2)}
MAX_FREEZE_RATIO = 0.8
SIZES = ((4, 8), (8, 16), (8, 8))
TIMED = ((16, 64), (64, 128))
"""(stages, microbatches) of about 2,048 and 16,384 actions."""


@dataclass(frozen=True)
class Problem:
    stages: int
    microbatches: int

    def plan(self, max_freeze_ratio: float, defer: bool = True, extra: int = 0, target_ms: float = 0.0) -> FreezePlan:
        schedule = one_forward_one_backward(self.stages, self.microbatches)
        times = {action: TIMES[action.kind] for action in schedule.actions}
        return solve(
            PlanProblem(
                Measurement(schedule, times),
                Limits(max_freeze_ratio, target_makespan_ms=target_ms, defer=defer, extra_microbatches=extra),
            )
        )


def main() -> None:
    command_line(__doc__).parse_args()
    rows, timed = [row(Problem(*size)) for size in SIZES], [seconds(Problem(*size)) for size in TIMED]
    record = {"machine": machine("ortools"), "rows": rows, "planner": timed}
    write_json(RESULTS, record)
    text = table(rows, timed)
    put_table(PAGE, "deferral", text)
    print(text)


def row(problem: Problem) -> dict[str, object]:
    """Plans of one pipeline: today's, exact ones, and those as fast as today's."""
    today = problem.plan(MAX_FREEZE_RATIO, defer=False)
    extra = problem.stages
    return {
        "stages": problem.stages,
        "microbatches": problem.microbatches,
        "in_place": outcome(today, today.makespan_ms.unfrozen),
        "exact": outcome(problem.plan(0.0)),
        "exact_twice": outcome(problem.plan(0.0, extra=extra)),
        "as_fast": outcome(problem.plan(MAX_FREEZE_RATIO, target_ms=today.makespan_ms.planned)),
        "as_fast_twice": outcome(problem.plan(MAX_FREEZE_RATIO, extra=extra, target_ms=today.makespan_ms.planned)),
        "most": outcome(problem.plan(MAX_FREEZE_RATIO)),
        "most_twice": outcome(problem.plan(MAX_FREEZE_RATIO, extra=extra)),
    }


def outcome(plan: FreezePlan, host_ms: float | None = None) -> dict[str, float]:
    host = host_ms or plan.makespan_ms.host or plan.makespan_ms.unfrozen
    return {"speedup": host / plan.makespan_ms.planned, "mean_freeze_ratio": plan.mean_freeze_ratio}


def seconds(problem: Problem) -> dict[str, float]:
    """The planner's time for a large pipeline, with freezing."""
    began = time.perf_counter()
    plan = problem.plan(MAX_FREEZE_RATIO, extra=4)
    actions = 2 * problem.stages * problem.microbatches
    return {
        "actions": actions,
        "seconds": time.perf_counter() - began,
        "optimality_gap": plan.solver.optimality_gap,
    }


def table(rows: list[dict[str, object]], timed: list[dict[str, float]]) -> str:
    head = [
        "stages x microbatches",
        "in place, r_max 0.8",
        "exact",
        "exact, twice the memory",
        "as fast as in place",
        "as fast, twice the memory",
        "most, r_max 0.8",
        "most, twice the memory",
    ]
    lines = []
    for one in rows:
        size = f"{one['stages']} x {one['microbatches']}"
        lines.append([size, *(cell(one[key]) for key in list(one)[2:])])  # type: ignore[arg-type]
    took = ", ".join(f"{int(one['actions']):,} actions in {one['seconds']:.1f} s" for one in timed)
    return f"{markdown_table(head, lines)}\n\nThe planner took, with freezing and 4 more microbatches: {took}."


def cell(of: dict[str, float]) -> str:
    frozen = f", {of['mean_freeze_ratio']:.2f} frozen" if of["mean_freeze_ratio"] else ""
    return f"{of['speedup']:.3f}x{frozen}"


if __name__ == "__main__":
    main()
