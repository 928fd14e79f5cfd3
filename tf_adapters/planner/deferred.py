"""Plans in which weight gradients wait: the order is rewritten, and freezing removes only the idle time left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean

from tf_adapters.errors import PlanInputError
from tf_adapters.measuring.estimates import grouped
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.planner.forecast import gaps_in
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.schedule.deferral import (
    DeferralTimes,
    defer,
    first_half,
    holds_within,
    joined,
    memory_limits,
    most_in_flight,
    second_half,
)
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

_ROUNDS = 4
"""The most orders that are tried. Each later order is made for the weight gradients that the last plan left."""

_ONE_ROUND_FROM = 1_000
"""From this number of actions on, only one order is tried, because a plan then takes a second or more."""

_SAME = 1e-6
"""Relative tolerance of makespans and freeze ratios; smaller differences are ignored."""


def plan_deferred(problem: PlanProblem, solve: Callable[[PlanProblem], FreezePlan]) -> FreezePlan:
    """Return the best plan found over rewritten orders, or the host's own order if no plan within the limits is better.

    A B is split into an I and a W. The I takes the B's lower bound, and the W takes the time that full freezing saves.
    Freezing shortens the W, and this changes the best order. Order and ratios are therefore computed in turn.
    ``solve`` makes the plan for one order. In the result, ``schedule`` is the order to run, ``makespan_ms.host`` is the
    makespan of the host's order with nothing frozen, and ``deferrable_share`` is set.

    Raises PlanInputError if no order is within the limits on microbatches.
    """
    measurement = problem.measurement
    host, times = measurement, _times(measurement.times)
    few = len(measurement.times) < _ONE_ROUND_FROM
    best: FreezePlan | None = None
    last: FreezePlan | None = None
    for _ in range(_ROUNDS if few else 1):
        rewritten = _rewritten(problem, times, last)
        last = solve(rewritten)
        if best is not None and not _is_better(last, best, problem):
            break
        best = _named(last, rewritten, host)
    assert best is not None
    best = replace(best, deferrable_share=_deferrable_share(measurement.times))
    fits = not saves_memory(problem)
    if fits and (few or best.span_ms.unfrozen >= host.span_ms * (1.0 - _SAME)):
        in_place = _in_place(problem)
        own = _named(solve(in_place), in_place, host)
        if not _is_better(best, own, problem):
            return replace(own, deferrable_share=best.deferrable_share)
    return best


def saves_memory(problem: PlanProblem) -> bool:
    """Return whether the limits on microbatches exclude the host's order. The problem defers."""
    return not holds_within(problem.measurement.schedule, _memory_limits(problem))


def describe_deferral(plan: FreezePlan, host: PipelineSchedule) -> str:
    """Describe a deferral: the share that can wait, the saving, and the memory. The plan has a ``deferrable_share``."""
    shares = plan.deferrable_share.values()
    spans, order = plan.span_ms, plan.schedule or host
    saved_ms = (spans.host or spans.unfrozen) - spans.unfrozen
    saved = f"{'saves' if saved_ms >= 0.0 else 'costs'} {abs(saved_ms):.1f} ms a step"
    saved += " with nothing frozen" if plan.mean_freeze_ratio else ""
    return (
        f"weight gradients that can wait are {min(shares):.0%} to {max(shares):.0%} of a stage's backwards; "
        f"their order {saved}; a rank holds {most_in_flight(order)} "
        f"microbatches at most, in the host's order {most_in_flight(host)}"
    )


def _named(plan: FreezePlan, problem: PlanProblem, host: Measurement) -> FreezePlan:
    """Return the plan with its order, and with the spans of the host's order."""
    makespan = replace(plan.makespan_ms, host=host.dag.makespan(host.upper))
    period = plan.period_ms and replace(plan.period_ms, host=host.span_ms)
    return replace(plan, schedule=problem.measurement.schedule, makespan_ms=makespan, period_ms=period)


def _deferrable_share(times: Mapping[Action, Bounds]) -> dict[int, float]:
    """Return, for each stage, the share of its backwards' time that is weight gradients which can wait."""
    backwards = grouped((a.stage, bounds) for a, bounds in times.items() if a.kind is Kind.BACKWARD)
    whole = {stage: sum(bounds.upper for bounds in of_stage) for stage, of_stage in backwards.items()}
    return {
        stage: 1.0 - sum(bounds.lower for bounds in of_stage) / whole[stage] if whole[stage] else 0.0
        for stage, of_stage in sorted(backwards.items())
    }


def _is_better(plan: FreezePlan, best: FreezePlan, problem: PlanProblem) -> bool:
    """Return whether a plan ends earlier, or as early at a lower price. All ends before the target count as equal."""
    ends, best_ends = (max(p.span_ms.planned, problem.limits.target_makespan_ms) for p in (plan, best))
    if abs(ends - best_ends) > _SAME * best_ends:
        return ends < best_ends
    price, best_price = (fmean(map(problem.price, p.freeze_ratio.values())) for p in (plan, best))
    return price < best_price - _SAME


def _in_place(problem: PlanProblem) -> PlanProblem:
    return replace(problem, limits=replace(problem.limits, defer=False, extra_microbatches=0))


def _times(host: Mapping[Action, Bounds]) -> dict[Action, Bounds]:
    times = dict(host)
    for action, bounds in host.items():
        if action.kind is Kind.BACKWARD:
            times[first_half(action)] = Bounds(bounds.lower, bounds.lower)
            times[second_half(action)] = Bounds(0.0, bounds.upper - bounds.lower)
    return times


def _rewritten(problem: PlanProblem, times: dict[Action, Bounds], last: FreezePlan | None) -> PlanProblem:
    """Return the problem with its order rewritten for what a ``last`` plan computes; without one nothing is frozen."""
    durations = {action: bounds.upper for action, bounds in times.items()}
    if last is not None:
        for action, ratio in last.freeze_ratio.items():
            weights = second_half(action)
            durations[weights] = (1.0 - ratio) * times[weights].upper + ratio * times[weights].lower
    host = problem.measurement
    gaps = host.gaps.renamed(first_half, times)
    between = host.between_steps if host.overlap else None
    rewritten = _deferred(problem, DeferralTimes(durations, gaps.communication, gaps.overhead, between))
    order = joined(rewritten, host.times)
    ordered = replace(
        host,
        schedule=order,
        times={action: times[action] for action in order.actions},
        **gaps_in(order, host.schedule, host.gaps)._asdict(),
    )
    return _in_place(replace(problem, measurement=ordered))


def _deferred(problem: PlanProblem, times: DeferralTimes) -> PipelineSchedule:
    """Return the best order within the limits. Raises PlanInputError, with the lowest limits, if there is none."""
    limits, host = problem.limits, problem.measurement
    fitting = host.fitting_microbatches if limits.fills_memory else {}

    def within(more: int) -> PipelineSchedule | None:
        return defer(
            host.schedule,
            times,
            extra_microbatches=limits.extra_microbatches + more,
            fitting={rank: count + more for rank, count in fitting.items()},
            moves_forwards=limits.moves_forwards,
            moves_stages=limits.moves_stages,
        )

    if (order := within(0)) is not None:
        return order
    more = max(1, 1 - min(_memory_limits(problem)))
    while within(more) is None:  # it ends at the latest where the host's order is within the limits
        more += 1
    if fitting:
        raise PlanInputError(
            f"fitting_microbatches: {dict(fitting)}: no order of this schedule holds so few microbatches; "
            f"{more} more on each rank would be enough"
        )
    raise PlanInputError(
        f"extra_microbatches: {limits.extra_microbatches}: no order of this schedule holds so few microbatches; "
        f"allowed is at least {limits.extra_microbatches + more}"
    )


def _memory_limits(problem: PlanProblem) -> tuple[int, ...]:
    """Return how many microbatches each rank may hold."""
    measurement, limits = problem.measurement, problem.limits
    fitting = measurement.fitting_microbatches if limits.fills_memory else {}
    return memory_limits(measurement.schedule, limits.extra_microbatches, fitting)
