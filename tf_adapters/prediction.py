"""What a plan promises for a whole training step, and not only for the pipeline's part of it."""

from __future__ import annotations

from dataclasses import dataclass

from tf_adapters.dag import PipelineDag
from tf_adapters.ir import Action, PipelineSchedule
from tf_adapters.planner import FreezePlan


@dataclass(frozen=True, slots=True)
class Forecast:
    """Step times in ms: measured with nothing frozen, and planned for stable freezing."""

    unfrozen_ms: float
    planned_ms: float

    @property
    def ratio(self) -> float:
        """Planned over unfrozen step time."""
        return self.planned_ms / self.unfrozen_ms if self.unfrozen_ms > 0 else 1.0


def forecast(schedule: PipelineSchedule, plan: FreezePlan, unfrozen_step_ms: float) -> Forecast:
    """The planned step time: what freezing takes off the makespan, off the measured step.

    The rest of the step (data, communication, optimizer) stays as it was measured.
    """
    saved = plan.makespan_ms.unfrozen - planned_makespan(schedule, plan)
    return Forecast(unfrozen_step_ms, unfrozen_step_ms - saved)


def planned_makespan(schedule: PipelineSchedule, plan: FreezePlan) -> float:
    """Makespan in ms under the plan, with the backwards that disappear: stage 0, everything frozen.

    Stage 0 passes no input gradient on, so with all of its parameters frozen nothing is left to compute. The
    program plans with the straight line that partial masks follow; this is the one point that is not on it.
    """
    durations = dict(plan.duration_ms)
    for action, ratio in plan.freeze_ratio.items():
        if ratio >= 1.0 and disappears(action):
            durations[action] = 0.0
    return PipelineDag.from_schedule(schedule).makespan(durations)


def disappears(action: Action) -> bool:
    """Whether nothing of a backward is left once all of its parameters are frozen: stage 0 passes no gradient on.

    With split backwards that is stage 0's W: torch computes its whole backward there and nothing in its I.
    """
    return action.stage == 0 and action.freezable
