"""The expected time of a whole training step under a plan, of which the pipeline is one part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.transfers import Gaps
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.deferral import backward_of, first_half, keeps_order
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.period import PeriodicDag


@dataclass(frozen=True, slots=True)
class Forecast:
    """Step times in ms: measured with nothing frozen, and planned for stable freezing."""

    unfrozen_ms: float
    planned_ms: float

    @property
    def ratio(self) -> float:
        return self.planned_ms / self.unfrozen_ms if self.unfrozen_ms > 0 else 1.0


def forecast(
    measurement: Measurement,
    plan: FreezePlan,
    steps: Sequence[Mapping[Action, float]] = (),
    stage_0_vanishes: bool = True,
) -> Forecast:
    """The measured step time less what freezing saves in the pipeline, in ms.

    The rest of the step (data, optimizer) stays as it was measured. ``steps`` are durations of monitored steps with
    nothing frozen, ms. Each step is replayed in the DAG with its backwards shortened as the plan says, and the median
    saving counts. A replay of median durations would not show how an action that is sometimes slow delays its
    neighbours. If the replayed batch is longer than the measured step, the step shrinks by the same share as the batch.
    ``stage_0_vanishes`` says that stage 0's backward takes no time where all of it is frozen (``disappears``). Pass
    False where some of its parameters are excluded from freezing.
    """
    upper, rewritten = measurement.upper, planned_dag(measurement, plan)
    planned = stable_durations(plan.duration_ms, plan.freeze_ratio) if stage_0_vanishes else plan.duration_ms
    # A half of a backward is a part of what the host's whole one takes.
    whole = {action: action if action in upper else backward_of(action) for action in planned}
    left = {a: ms / upper[whole[a]] if upper[whole[a]] > 0.0 else 1.0 for a, ms in planned.items()}

    step_ms = measurement.unfrozen_step_ms

    def saved(durations: Mapping[Action, float]) -> float:
        span_ms = measurement.dag.span_ms(durations)
        planned_ms = rewritten.span_ms({a: durations[whole[a]] * left[a] for a in planned})
        return (span_ms - planned_ms) * (min(1.0, step_ms / span_ms) if span_ms > 0.0 else 1.0)

    return Forecast(step_ms, step_ms - float(np.median(list(map(saved, steps or [upper])))))


def cost_of_meeting(measurement: Measurement, plan: FreezePlan) -> float:
    """Return the time in ms that a step would save if the ranks did not meet: the plan's makespan less its period.

    Another plan, made for ranks that do not meet, may save more.
    """
    order = plan.schedule or measurement.schedule
    dag = planned_dag(replace(measurement, steps="meet"), plan)
    return dag.makespan(plan.duration_ms) - PeriodicDag.of(dag, order, {}).span_ms(plan.duration_ms)


def planned_dag(measurement: Measurement, plan: FreezePlan | None) -> PipelineDag:
    """Return the DAG of the order that runs: the plan's own if weight gradients wait, else the host's."""
    if plan is None or plan.schedule is None:
        return measurement.dag
    return measurement.dag_of(plan.schedule, gaps_in(plan.schedule, measurement.schedule, measurement.gaps))


def gaps_in(rewritten: PipelineSchedule, host: PipelineSchedule, gaps: Gaps) -> Gaps:
    """The host's gaps in a rewritten order; ``waits`` hold only where forwards and backwards keep their order."""
    actions = frozenset(rewritten.actions)

    def in_rewritten(action: Action) -> Action:
        return action if action in actions else first_half(action)

    renamed = gaps.renamed(in_rewritten, actions)
    return renamed if keeps_order(host, rewritten) else renamed._replace(waits={})


def durations_under(plan: FreezePlan, bounds: Mapping[Action, Bounds]) -> dict[Action, float]:
    """Return each action's duration in ms under the plan's freeze ratios and new ``bounds`` of the host's actions.

    Where the plan splits a B of the host, the I takes the B's lower bound and the W the rest.
    """

    def duration(action: Action) -> float:
        ratio = plan.freeze_ratio.get(action, 0.0)
        if action in bounds:
            return bounds[action].upper - ratio * (bounds[action].upper - bounds[action].lower)
        whole = bounds[backward_of(action)]
        return whole.lower if action.kind is Kind.INPUT_GRAD else (1.0 - ratio) * (whole.upper - whole.lower)

    return {action: duration(action) for action in plan.duration_ms}


def disappears(action: Action) -> bool:
    """Return whether an action takes no time if all parameters of its stage are frozen.

    Only stage 0's B and W do: stage 0 passes no input gradient on. If its backward is split, torch computes all of it
    in the W, and nothing in the I.
    """
    return action.stage == 0 and action.freezable


def stable_durations(duration_ms: Mapping[Action, float], freeze_ratio: Mapping[Action, float]) -> dict[Action, float]:
    """Durations in ms under freeze ratios; 0 for stage 0's backwards with everything frozen (``disappears``).

    The planner assumes that durations are linear in the ratio. The fully frozen backward of stage 0 is shorter.
    """
    vanished = (action for action, ratio in freeze_ratio.items() if ratio >= 1.0 and disappears(action))
    return {**duration_ms, **dict.fromkeys(vanished, 0.0)}
