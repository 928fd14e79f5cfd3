"""Plan a pipeline for each goal of a run: the same order and times, with the settings that the goal chooses."""

from __future__ import annotations

from dataclasses import replace

from tf_adapters.goals import GOALS
from tf_adapters.planner.forecast import planned_dag
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.program import Progress
from tf_adapters.planner.solve import solve
from tf_adapters.schedule.deferral import whole_microbatches_held
from tf_adapters.simulate.simulated_pipeline import Pipeline, in_v
from tf_adapters.simulate.simulation import GoalPoint, Placement, gain_of

MOST_ACTIONS = 1_024  # up to which the plans of all goals take a second or two
WORTH_MEMORY = 0.01  # more microbatches in memory are named if they save at least this share
PAPER = float(GOALS["paper"]["max_freeze_ratio"])


def goal_points(pipeline: Pipeline, progress: Progress | None = None) -> tuple[GoalPoint, ...]:
    """Plan each goal, "exact" also with more microbatches in memory and in a V, the fastest of these first.

    Empty for pipelines of many actions.
    ``progress`` gets lines of text. Raises SolverError as the planner does.
    """
    if len(pipeline.schedule.actions) > MOST_ACTIONS:
        return ()
    exact = _point(pipeline, progress, "exact", 0.0)
    roomy = _point(pipeline, progress, "exact", 0.0, extra=len(pipeline.schedule.ranks))
    worth_it = roomy.batch.ms < (1.0 - WORTH_MEMORY) * exact.batch.ms
    exacts = [exact, *([roomy] if worth_it else [])]
    if (cut := in_v(pipeline.measurement)) is not None:
        unfrozen_ms = pipeline.measurement.dag.span_ms(pipeline.measurement.upper)
        exacts.append(
            _point(Pipeline(pipeline.name, cut), progress, "exact", 0.0, placement="v", unfrozen_ms=unfrozen_ms)
        )
    return (
        *sorted(exacts, key=lambda point: (round(point.batch.ms, 6), point.held)),
        _point(pipeline, progress, "paper", PAPER),
    )


def _point(
    pipeline: Pipeline,
    progress: Progress | None,
    goal: str,
    ratio: float,
    *,
    extra: int = 0,
    placement: Placement = "host",
    unfrozen_ms: float | None = None,
) -> GoalPoint:
    """Plan a goal. ``unfrozen_ms`` is the host's batch with nothing frozen, by default that of this pipeline."""
    known = replace(pipeline.measurement, token_costs={})
    defers = GOALS[goal]["weight_gradients"] == "deferred"
    limits = Limits.of_training(ratio, defer=defers, extra_microbatches=extra)
    plan = solve(PlanProblem(known, limits), progress=progress and (lambda text: progress(f"goal {goal}: {text}")))
    unfrozen_ms = known.dag.span_ms(known.upper) if unfrozen_ms is None else unfrozen_ms
    batch = gain_of(planned_dag(known, plan), unfrozen_ms, durations=plan.duration_ms, ratios=plan.freeze_ratio)
    held = whole_microbatches_held(plan.schedule or pipeline.schedule)
    return GoalPoint(goal, extra, placement, batch, held=held, mean_freeze_ratio=plan.mean_freeze_ratio)
