"""Plans in which weight gradients wait: the order is rewritten, and only what still does not fit is frozen."""

from __future__ import annotations

from dataclasses import replace

from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.deferral import defer, first_half, most_in_flight
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind

__all__ = ["deferred_problem", "host_makespan"]


def host_makespan(problem: PlanProblem) -> float:
    """The host's own order with nothing frozen, ms."""
    dag = PipelineDag.from_schedule(problem.schedule, problem.communication, problem.overhead)
    return dag.makespan({action: bounds.upper for action, bounds in problem.times.items()})


def deferred_problem(problem: PlanProblem, last: FreezePlan | None = None) -> PlanProblem:
    """The problem with its order rewritten for the durations of a ``last`` plan, else for nothing frozen."""
    times: dict[Action, Bounds] = {}
    for action, bounds in problem.times.items():
        if action.kind is Kind.BACKWARD:
            whole = bounds.upper - bounds.lower
            times[replace(action, kind=Kind.INPUT_GRAD)] = Bounds(bounds.lower, bounds.lower)
            times[replace(action, kind=Kind.WEIGHT_GRAD)] = Bounds(0.0, whole)
        else:
            times[action] = bounds
    communication = {(first_half(s), first_half(t)): ms for (s, t), ms in problem.communication.items()}
    durations = last.duration_ms if last else {action: bounds.upper for action, bounds in times.items()}
    limit = most_in_flight(problem.schedule) + problem.extra_microbatches
    return replace(
        problem,
        schedule=defer(problem.schedule, durations, communication, limit),
        times=times,
        communication=communication,
        overhead={first_half(action): ms for action, ms in problem.overhead.items()},
        defer=False,
        extra_microbatches=0,
    )
