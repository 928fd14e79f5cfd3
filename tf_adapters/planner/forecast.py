"""What a plan promises for a whole training step, and not only for the pipeline's part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.timing.timer import Trace
from tf_adapters.timing.transfers import NO_GAPS, Gaps

__all__ = ["Forecast", "disappears", "forecast", "planned_makespan", "stable_durations"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Step times in ms: measured with nothing frozen, and planned for stable freezing."""

    unfrozen_ms: float
    planned_ms: float

    @property
    def ratio(self) -> float:
        """Planned over unfrozen step time."""
        return self.planned_ms / self.unfrozen_ms if self.unfrozen_ms > 0 else 1.0


def forecast(
    schedule: PipelineSchedule,
    plan: FreezePlan,
    bounds: Mapping[Action, Bounds],
    unfrozen_step_ms: float,
    gaps: Gaps = NO_GAPS,
    steps: Sequence[Trace] = (),
    stage_0_vanishes: bool = True,
) -> Forecast:
    """The planned step time: what freezing takes off the pipeline, off the measured step.

    The rest of the step (data, optimizer) stays as it was measured. ``steps`` are monitored steps, nothing frozen:
    each is run again on paper with its backwards as much shorter as the plan makes them. Actions that now and then
    take longer hold up their neighbours, more so the closer a pipeline is to balance; medians alone do not show it.
    ``stage_0_vanishes``: whether stage 0 has nothing to compute where it is frozen whole (``disappears``); it has
    where some parameters are excluded from freezing.
    """
    dag = PipelineDag.from_schedule(schedule, *gaps)
    planned = stable_durations(plan.duration_ms, plan.freeze_ratio) if stage_0_vanishes else plan.duration_ms
    upper = {action: bound.upper for action, bound in bounds.items()}
    left = dag.durations({action: ms / upper[action] if upper[action] > 0.0 else 1.0 for action, ms in planned.items()})
    before = [dag.durations({action: span.end_ms - span.start_ms for action, span in step.items()}) for step in steps]
    before = before or [dag.durations(upper)]
    saved = float(np.median([dag.end(durations) - dag.end(durations * left) for durations in before]))
    return Forecast(unfrozen_step_ms, unfrozen_step_ms - saved)


def planned_makespan(schedule: PipelineSchedule, plan: FreezePlan) -> float:
    """Makespan in ms under the plan, with the backwards that disappear (``stable_durations``)."""
    return PipelineDag.from_schedule(schedule).makespan(stable_durations(plan.duration_ms, plan.freeze_ratio))


def disappears(action: Action) -> bool:
    """Whether an action takes no time once all of its stage's parameters are frozen.

    Stage 0 passes no input gradient on, so nothing of its B is left. Of split backwards it is stage 0's W: torch
    computes the whole backward there and nothing in its I.
    """
    return action.stage == 0 and action.freezable


def stable_durations(duration_ms: Mapping[Action, float], freeze_ratio: Mapping[Action, float]) -> dict[Action, float]:
    """Durations in ms under freeze ratios, with the backwards that disappear: stage 0, everything frozen.

    Stage 0 passes no input gradient on, so with all of its parameters frozen nothing is left to compute. The
    program plans with the straight line that partial masks follow; this is the one point that is not on it.
    """
    gone = (action for action, ratio in freeze_ratio.items() if ratio >= 1.0 and disappears(action))
    return {**duration_ms, **dict.fromkeys(gone, 0.0)}
