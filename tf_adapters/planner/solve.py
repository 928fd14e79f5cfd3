"""How much of each backward's weight-gradient work to skip: paper, "Phase II: Freeze Ratio Formulation"."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from tf_adapters.errors import PlanInputError, SolverError
from tf_adapters.planner.freeze_plan import FreezePlan, Makespan, SolverReport
from tf_adapters.planner.glop import solve_glop
from tf_adapters.planner.optimality import lower_bound
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.planner.program import FreezeProblem, Optimum, SolverStatus
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule

__all__ = ["plan", "plan_from_json", "solve"]

_SNAP = 1e-9
_BUDGET_TOLERANCE = 1e-6
_GRID = 2.0**-34
_EXACT_UP_TO = 4_096
"""Actions up to which GLOP solves the program: its time grows with their square."""

_WIDEST_GAP = 1e-3
"""A gap of the interior point method above which GLOP tries, in the time that is left."""

_GLOP, _INTERIOR = "GLOP", "interior point"


def plan(
    schedule: PipelineSchedule,
    times: Mapping[Action, Bounds | tuple[float, float]],
    max_freeze_ratio: float,
    communication: Mapping[tuple[Action, Action], float] | None = None,
    time_limit_s: float | None = None,
    overhead: Mapping[Action, float] | None = None,
    target_makespan_ms: float = 0.0,
) -> FreezePlan:
    """``solve`` of a PlanProblem with these fields; ``times`` may have pairs (all frozen, nothing frozen) in ms."""
    problem = PlanProblem(
        schedule=schedule,
        times=cast("Mapping[Action, Bounds]", times),
        max_freeze_ratio=max_freeze_ratio,
        communication=communication or {},
        overhead=overhead or {},
        target_makespan_ms=target_makespan_ms,
    )
    return solve(problem, time_limit_s)


def plan_from_json(data: dict[str, Any], time_limit_s: float | None = None) -> FreezePlan:
    """``solve`` of an INPUT object. Raises PlanInputError, one line that names the field, and SolverError."""
    return solve(PlanProblem.from_json(data), time_limit_s)


def solve(problem: PlanProblem, time_limit_s: float | None = None) -> FreezePlan:
    """Choose the freeze ratios that end the batch earliest and, among those, freeze least.

    In every stage the sum of the ratios is at most ``max_freeze_ratio`` times the number of the stage's B and W
    actions (the paper's constraint [4]). An action whose two times are equal gets ratio 0 and still counts in that
    number: the budget bounds the share of its updates that a parameter loses in expectation, and an update that is
    never skipped is one of them. A batch that ends by ``target_makespan_ms`` is early enough: the plan then freezes
    the least that reaches it.

    Up to 4,096 actions GLOP finds the exact optimum. Larger programs go to an interior point method whose time
    and memory grow in proportion to the actions; ``solver.optimality_gap`` proves how close it came, at most
    0.1% of the makespan.

    Raises ScheduleError for a schedule that cannot run, PlanInputError for times, ratios and limits that
    are missing or out of range, SolverError when the solver does not reach the optimum (within
    ``time_limit_s``, if given).
    """
    problem = problem.validate()
    if time_limit_s is not None and not time_limit_s > 0.0:
        raise PlanInputError(f"time_limit_s: {time_limit_s!r} is not a number of seconds above 0")
    program = _program(problem)
    began = time.perf_counter()
    outcome = _optimise(program, problem.max_freeze_ratio, time_limit_s, problem.target_makespan_ms)
    return _describe(problem.schedule, program, outcome, time.perf_counter() - began)


def _program(problem: PlanProblem) -> FreezeProblem:
    dag = PipelineDag.from_schedule(problem.schedule, problem.communication, problem.overhead)
    upper = np.array([problem.times[action].upper for action in dag.actions])
    lower = np.array([problem.times[a].lower if a.freezable else problem.times[a].upper for a in dag.actions])
    if not math.isfinite(dag.end(upper)):
        raise PlanInputError("times: they add up to more than a float holds")
    members: dict[int, list[int]] = {}
    for position, action in enumerate(dag.actions):
        if action.freezable:
            members.setdefault(action.stage, []).append(position)
    return FreezeProblem(
        dag=dag,
        upper=upper,
        ranges=upper - lower,
        stages={stage: np.array(positions) for stage, positions in sorted(members.items())},
        budgets={stage: problem.max_freeze_ratio * len(positions) for stage, positions in members.items()},
    )


class _Outcome(NamedTuple):
    """Which solver ended how, its ratios in the order of the DAG's actions, and how far they are from the best."""

    solver: str
    status: SolverStatus
    ratios: NDArray[np.float64]
    gap: float


def _optimise(problem: FreezeProblem, max_freeze_ratio: float, time_limit_s: float | None, target: float) -> _Outcome:
    nothing = np.zeros_like(problem.upper)
    unfrozen = problem.end(nothing)
    scaled = _scaled(problem) if max_freeze_ratio > 0.0 and unfrozen > target else None
    if scaled is None or not scaled.ranges.any():
        return _Outcome(_GLOP, SolverStatus.NOT_NEEDED, nothing, 0.0)
    goal = target / unfrozen * scaled.end(nothing)

    def proven(solver: str, found: Optimum) -> _Outcome:
        optimum = Optimum(_repair(problem, found.ratios), found.flow)
        gap = _gap(problem.end(optimum.ratios), max(lower_bound(problem, optimum), target))
        return _Outcome(solver, SolverStatus.OPTIMAL, optimum.ratios, gap)

    def glop(limit_s: float | None) -> _Outcome:
        return proven(_GLOP, solve_glop(scaled, limit_s, goal))

    if len(problem.dag.actions) <= _EXACT_UP_TO:
        return glop(time_limit_s)
    from tf_adapters.planner.interior import solve_interior

    began = time.monotonic()
    near = proven(_INTERIOR, solve_interior(scaled, time_limit_s, goal))
    if near.gap <= _WIDEST_GAP:
        return near
    try:
        return glop(None if time_limit_s is None else time_limit_s - (time.monotonic() - began))
    except SolverError:
        return near._replace(status=SolverStatus.FEASIBLE)


def _scaled(problem: FreezeProblem) -> FreezeProblem | None:
    """The same problem without a unit of time, or None when every time is 0.

    Times become multiples of the unfrozen makespan, rounded to a grid of 2**-34 of it. Without the rounding
    the same times in other units differ in their last bit, and that bit can choose another one of several
    optima. The factor, about a rank's number of actions, then brings a typical duration near 1, GLOP's size.
    """
    makespan = problem.end(np.zeros_like(problem.upper))
    if makespan == 0.0:
        return None
    factor = 2.0 ** math.ceil(math.log2(len(problem.dag.actions) / len(problem.stages) + 1.0))

    def rescale(times: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.round(times / makespan / _GRID) * _GRID * factor, dtype=np.float64)

    dag, upper = problem.dag, rescale(problem.upper)
    return FreezeProblem(
        dag=PipelineDag(dag.actions, dag.index, dag.edges._replace(delay=rescale(dag.edges.delay))),
        upper=upper,
        ranges=upper - rescale(problem.upper - problem.ranges),
        stages=problem.stages,
        budgets=problem.budgets,
    )


def _repair(problem: FreezeProblem, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """Take the solver's tolerance out of ``ratios``: exact zeros and ones, budgets kept."""
    repaired = np.clip(ratios, 0.0, 1.0)
    repaired[repaired < _SNAP] = 0.0
    repaired[repaired > 1.0 - _SNAP] = 1.0
    for stage, positions in problem.stages.items():
        total, budget = float(repaired[positions].sum()), problem.budgets[stage]
        if total > budget * (1.0 + _BUDGET_TOLERANCE) + _BUDGET_TOLERANCE:
            raise SolverError(f"GLOP ended OPTIMAL but stage {stage} freezes {total:g}, above {budget:g}")
        if total > budget + _SNAP:
            repaired[positions] *= budget / total
    return repaired


def _describe(schedule: PipelineSchedule, problem: FreezeProblem, outcome: _Outcome, seconds: float) -> FreezePlan:
    dag, ratios = problem.dag, outcome.ratios
    # Not upper - ratio * range where the ratio is 1: rounding could end below the lower bound.
    durations = np.where(ratios == 1.0, problem.upper - problem.ranges, problem.upper - ratios * problem.ranges)
    starts = dag.earliest_starts(durations)

    def by_action(values: NDArray[np.float64], freezable: bool = False) -> dict[Action, float]:
        keep = (action for action in schedule.actions if action.freezable or not freezable)
        return {action: float(values[dag.index[action]]) for action in keep}

    length = by_action(durations)
    freezable = np.concatenate(list(problem.stages.values()))
    return FreezePlan(
        makespan_ms=Makespan(
            problem.end(np.zeros_like(ratios)), problem.end(ratios), problem.end(np.ones_like(ratios))
        ),
        freeze_ratio=by_action(ratios, freezable=True),
        start_ms=by_action(starts),
        duration_ms=length,
        mean_freeze_ratio=float(ratios[freezable].mean()),
        stage_freeze_ratio={stage: float(ratios[p].mean()) for stage, p in problem.stages.items()},
        critical_path=dag.critical_path(length),
        solver=SolverReport(outcome.solver, outcome.status, seconds, outcome.gap),
    )


def _gap(planned: float, bound: float) -> float:
    return max(0.0, (planned - bound) / planned) if planned > 0.0 else 0.0
