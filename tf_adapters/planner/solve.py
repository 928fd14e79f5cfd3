"""Choose the share of each backward's weight-gradient work to skip: paper, "Phase II: Freeze Ratio Formulation"."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from tf_adapters.errors import PlanInputError, SolverError
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.planner.deferred import plan_deferred
from tf_adapters.planner.freeze_plan import FreezePlan, Makespan, SolverReport
from tf_adapters.planner.glop import solve_glop
from tf_adapters.planner.optimality import optimality_gap
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.program import Floats, FreezeProgram, Optimum, Progress, SolverStatus
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule

_SNAP = 1e-9
_BUDGET_TOLERANCE = 1e-6
_EXACT_UP_TO = 4_096
"""Actions up to which GLOP solves the program: its time grows with their square."""

_WIDEST_GAP = 1e-3
"""GLOP tries, too, if the proven ``optimality_gap`` of the interior point method's plan is larger than this."""

_SECOND_TRY_S = 20.0
"""The most seconds that GLOP may then take."""

LONGEST_S = 1e6
"""Seconds of the longest time limit. A longer one, or infinity, counts as this: GLOP takes whole milliseconds."""

_GLOP, _INTERIOR = "GLOP", "interior point"


def plan(
    schedule: PipelineSchedule,
    times: Mapping[Action, Bounds | tuple[float, float]],
    max_freeze_ratio: float,
    communication: Mapping[tuple[Action, Action], float] | None = None,
    time_limit_s: float | None = None,
    overhead: Mapping[Action, float] | None = None,
    target_makespan_ms: float = 0.0,
    waits: Mapping[tuple[Action, Action], float] | None = None,
) -> FreezePlan:
    """``solve`` of a PlanProblem with these fields; ``times`` may have pairs (all frozen, nothing frozen) in ms."""
    known = cast("Mapping[Action, Bounds]", times)
    measurement = Measurement(schedule, known, communication or {}, overhead=overhead or {}, waits=waits or {})
    return solve(PlanProblem(measurement, Limits(max_freeze_ratio, target_makespan_ms)), time_limit_s)


def plan_from_json(
    data: dict[str, Any], time_limit_s: float | None = None, progress: Progress | None = None
) -> FreezePlan:
    """``solve`` of an INPUT object. Raises PlanInputError, one line that names the field, and SolverError."""
    return solve(PlanProblem.from_json(data), time_limit_s, progress)


def solve(problem: PlanProblem, time_limit_s: float | None = None, progress: Progress | None = None) -> FreezePlan:
    """Choose the freeze ratios that end the batch earliest and, among those, freeze least.

    Where steps overlap (``measurement.steps``), the period is as short as possible instead.

    In every stage the sum of the ratios is at most ``max_freeze_ratio`` times the number of the stage's B and W actions
    (the paper's constraint [4]). An action whose two times are equal gets ratio 0 and still counts in that number. The
    budget bounds the share of its updates that a parameter is expected to lose, and this action is one of them. No
    single ratio exceeds ``max_action_freeze_ratio``. With a ``token_cost`` the plan makes the least noise instead of
    freezing the least. Where a microbatch's mean over the stages would exceed ``max_microbatch_freeze_ratio``, its
    ratios are limited and the program is solved again. A batch that ends by ``target_makespan_ms``, or a period of this
    length, is early enough: the plan then freezes the least that reaches it.

    Up to 4,096 actions GLOP finds the exact optimum. Larger programs go to an interior point method whose time and
    memory grow in proportion to the actions. ``solver.optimality_gap`` proves how close it came. Where that is above
    0.1% of the makespan, GLOP tries for at most 20 s, and the better plan is returned, with status FEASIBLE where it
    is not GLOP's. ``progress`` is told in words how far the solve has come.

    With ``defer`` the order is rewritten first (``planner.deferred``), and each order has ``time_limit_s``.

    Raises ScheduleError for a schedule that cannot run, PlanInputError for times, ratios and limits that
    are missing or out of range, SolverError when no solver has a plan (within ``time_limit_s``, if given).
    """
    problem = problem.validate()
    if time_limit_s is not None:
        if not time_limit_s > 0.0:
            raise PlanInputError(f"time_limit_s: {time_limit_s!r} is not a number of seconds above 0")
        time_limit_s = min(time_limit_s, LONGEST_S)
    progress = progress or (lambda _: None)
    measurement, limits = problem.measurement, problem.limits
    if limits.defer:
        return plan_deferred(problem, lambda one_order: solve(one_order, time_limit_s, progress))
    progress(f"{len(measurement.schedule.actions):,} actions")
    program = FreezeProgram.of(problem)
    began = time.perf_counter()
    outcome = _optimise(program, limits.target_makespan_ms, time_limit_s, progress)
    limit, limited = limits.max_microbatch_freeze_ratio, set[int]()
    while frozen := set(program.frozen_microbatches(outcome.ratios, limit)) - limited:  # each one is limited once
        everyone = len(program.dag.actions) > _EXACT_UP_TO
        if everyone:
            frozen = set(range(measurement.schedule.num_microbatches))
        limited |= frozen
        program = program.limited(frozen, limit)
        outcome = _optimise(program, limits.target_makespan_ms, time_limit_s, progress)
    return _describe(measurement.schedule, program, outcome, time.perf_counter() - began)


class _Outcome(NamedTuple):
    """The solver and its status, the ratios in the order of the DAG's actions, and their proven gap."""

    solver: str
    status: SolverStatus
    ratios: Floats
    gap: float


def _optimise(program: FreezeProgram, target: float, time_limit_s: float | None, progress: Progress) -> _Outcome:
    no_freezing = np.zeros_like(program.upper)
    unfrozen = program.span(no_freezing)
    scaled = program.scaled() if unfrozen > target and any(program.budgets.values()) else None
    if scaled is None or not (scaled.ranges * scaled.most).any():
        return _Outcome(_GLOP, SolverStatus.NOT_NEEDED, no_freezing, 0.0)
    goal = target / unfrozen * scaled.span(no_freezing)

    def proven(solver: str, optimum: Optimum) -> _Outcome:
        optimum = Optimum(_repair(program, optimum.ratios), optimum.flow)
        return _Outcome(solver, SolverStatus.OPTIMAL, optimum.ratios, optimality_gap(program, optimum, target))

    if len(program.dag.actions) <= _EXACT_UP_TO:
        progress(f"GLOP, {len(program.dag.actions):,} actions")
        return proven(_GLOP, solve_glop(scaled, time_limit_s, goal))
    from tf_adapters.planner.interior import solve_interior

    began = time.monotonic()
    near = proven(_INTERIOR, solve_interior(scaled, progress, time_limit_s, goal))
    if near.gap <= _WIDEST_GAP:
        return near
    left = min(_SECOND_TRY_S, (time_limit_s or math.inf) - (time.monotonic() - began))
    progress(f"the interior point method is within {near.gap:.1%} of the optimum; GLOP tries for {left:.0f} s")
    try:
        exact = proven(_GLOP, solve_glop(scaled, left, goal))
    except SolverError:
        exact = near
    return exact if exact.gap < near.gap else near._replace(status=SolverStatus.FEASIBLE)


def _repair(program: FreezeProgram, ratios: Floats) -> Floats:
    """Take the solver's tolerance out of ``ratios``: exact zeros and ones, no ratio above its own limit or budget."""
    repaired = np.clip(ratios, 0.0, program.most)
    repaired[repaired < _SNAP] = 0.0
    repaired[repaired > 1.0 - _SNAP] = 1.0
    for stage, positions in program.stages.items():
        total, budget = float(repaired[positions].sum()), program.budgets[stage]
        if total > budget * (1.0 + _BUDGET_TOLERANCE) + _BUDGET_TOLERANCE:
            raise SolverError(f"the solver ended OPTIMAL but stage {stage} freezes {total:g}, above {budget:g}")
        if total > budget + _SNAP:
            repaired[positions] *= budget / total
    return repaired


def _describe(schedule: PipelineSchedule, program: FreezeProgram, outcome: _Outcome, seconds: float) -> FreezePlan:
    dag, ratios = program.dag, outcome.ratios
    # Not upper - ratio * range where the ratio is 1: rounding could end below the lower bound.
    durations = np.where(ratios == 1.0, program.upper - program.ranges, program.upper - ratios * program.ranges)

    def by_action(values: Floats, freezable: bool = False) -> dict[Action, float]:
        actions = (action for action in schedule.actions if action.freezable or not freezable)
        return {action: float(values[dag.index[action]]) for action in actions}

    def spans(of: Callable[[Floats], float]) -> Makespan:
        unfrozen, planned, frozen = (program.upper - share * program.ranges for share in (0.0, ratios, 1.0))
        return Makespan(of(unfrozen), of(planned), of(frozen))

    freezable = np.concatenate(list(program.stages.values()))
    return FreezePlan(
        makespan_ms=spans(dag.batch_end),
        period_ms=spans(dag.span) if len(dag.loops.sources) else None,
        freeze_ratio=by_action(ratios, freezable=True),
        start_ms=by_action(dag.earliest_starts(durations)),
        duration_ms=by_action(durations),
        mean_freeze_ratio=float(ratios[freezable].mean()),
        stage_freeze_ratio={stage: float(ratios[p].mean()) for stage, p in program.stages.items()},
        critical_path=dag.critical_path(by_action(durations)),
        solver=SolverReport(outcome.solver, outcome.status, seconds, outcome.gap),
    )
