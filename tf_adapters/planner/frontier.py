"""A plan that pays: of plans from no freezing to the most, the one with which training makes most progress in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tf_adapters.measuring.estimates import grouped
from tf_adapters.measuring.learning import Learning, StepProgress
from tf_adapters.planner.freeze_plan import FreezePlan, FrontierPoint
from tf_adapters.planner.problem import Limits, PlanProblem

_BETWEEN = 4
"""Plans between the one without freezing and the one with the most."""

SOLVES = _BETWEEN + 2

_MARGIN = 0.05
"""A plan takes the place of the one in force if it is better by more than this share plus the standard error.

A plan stays in force only while it is better than the plan with the least freezing. The margin is then half of this
share, plus the standard error. In the language model
study (docs/when.md) steps made up to 0.04 less progress than predicted on a task, and up to 0.09 in a single run.
"""


def plan_that_pays(problem: PlanProblem, solve: Callable[[PlanProblem], FreezePlan]) -> FreezePlan:
    """The plan of the frontier with the most progress in time. The measurement has ``learning``.

    The frontier goes in even steps of makespan from nothing frozen to the most that the problem's limits and target
    allow; ``solve`` plans for one point. The plan has the whole ``frontier``.
    """
    learning, limits = problem.measurement.learning, problem.limits
    assert learning is not None
    measurement = replace(problem.measurement, learning=None)

    def within(limits: Limits) -> FreezePlan:
        return solve(PlanProblem(measurement, limits))

    exact = within(replace(limits, max_freeze_ratio=0.0, target_makespan_ms=0.0))
    plans = [exact]
    if limits.max_freeze_ratio > 0.0:
        most = within(limits)
        longest, shortest = exact.span_ms.planned, most.span_ms.planned
        step = (longest - shortest) / (_BETWEEN + 1)
        targets = [longest - step * number for number in range(1, _BETWEEN + 1)] if step > 0.0 else []
        plans += [within(replace(limits, target_makespan_ms=target)) for target in targets]
        plans += [most] if targets else []
    host = exact.span_ms.host or exact.span_ms.unfrozen
    points = [_point(plan, learning, host, measurement.other_ms) for plan in plans]
    chosen = best_point(points, learning, current=0)
    frontier = tuple(replace(point, chosen=number == chosen) for number, point in enumerate(points))
    return replace(plans[chosen], frontier=frontier)


def best_point(points: Sequence[FrontierPoint], learning: Learning, current: int) -> int:
    """The point with the most progress in time, if it is clearly better than ``current``; else ``current``.

    A point is clearly better if it is better by more than 5% plus the standard error of the two points' difference. The
    first point freezes least. It takes the place of ``current`` first, unless ``current`` is better than the first
    point by more than 2.5% plus the standard error.
    """
    in_time = [_in_time(point, learning.progress(point.added_noise)) for point in points]

    def is_better(number: int, other: int, margin: float) -> bool:
        gain = in_time[number].share - in_time[other].share
        # One estimate of the signal is behind both errors, so that they move together.
        error = abs(in_time[number].error - in_time[other].error)
        return gain > margin * in_time[other].share + error

    held = current if is_better(current, 0, _MARGIN / 2) else 0
    best = max(range(len(points)), key=lambda number: in_time[number].share)
    return best if is_better(best, held, _MARGIN) else held


def describe_frontier(plan: FreezePlan) -> str:
    """Describe the candidates for the plan that pays most, and the reason of the choice. The plan has a frontier."""
    points = plan.frontier
    chosen = points[plan.chosen]
    best = max(points, key=lambda point: point.progress_in_time)
    told = (
        f"of {len(points)} plans that freeze {points[0].mean_freeze_ratio:.2f} to {points[-1].mean_freeze_ratio:.2f}, "
        f"{chosen.mean_freeze_ratio:.2f} pays best: a step is {chosen.speed:.2f}x as fast as the host's and makes "
        f"{chosen.progress:.3f} +- {chosen.progress_error:.3f} of its progress, {chosen.progress_in_time:.2f}x in the "
        "same time"
    )
    if best is chosen:
        return told
    other = f"{best.mean_freeze_ratio:.2f} would make {best.progress_in_time:.2f}x"
    return f"{told.replace('pays best', 'is taken')}; {other}, which is not clearly more"


def _in_time(point: FrontierPoint, progress: StepProgress) -> StepProgress:
    return StepProgress(point.speed * progress.share, point.speed * progress.error)


def _point(plan: FreezePlan, learning: Learning, host_ms: float, other_ms: float) -> FrontierPoint:
    by_stage = grouped((action.stage, ratio) for action, ratio in plan.freeze_ratio.items())
    added_noise = {stage: of_stage.added_noise(by_stage[stage]) for stage, of_stage in learning.stages.items()}
    progress = learning.progress(added_noise)
    return FrontierPoint(
        makespan_ms=plan.span_ms.planned,
        mean_freeze_ratio=plan.mean_freeze_ratio,
        speed=(host_ms + other_ms) / (plan.span_ms.planned + other_ms),
        added_noise=added_noise,
        progress=progress.share,
        progress_error=progress.error,
        chosen=False,
    )
