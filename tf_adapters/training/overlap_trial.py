"""Try steps that overlap in a few steps, where the measurement cannot tell whether ranks meet between steps.

    steps       6 in stable training    6                           then
    plan        for ranks that meet     for steps that overlap      the faster one

There is no trial if the plan for steps that overlap promises almost no shorter step. The trial's steps train like all
others. A resumed run goes on with the plan that was in force.
"""

from __future__ import annotations

from typing import NamedTuple

from tf_adapters.collectives import decide_from_all
from tf_adapters.measuring.estimates import median
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.phase import Phase
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.training.batches import BatchPlan
from tf_adapters.training.plan_maker import PlanJob, Planned, RunSetup
from tf_adapters.training.state import RunState

STEPS = 6
"""Number of steps that run with each plan."""

_TIMED = 4
"""The median of this many of the newest steps counts. The first step of a plan is slower."""

_PAYS = 0.99
"""A plan is tried if its planned step takes at most this share of the step that is planned now."""

REASON = "a trial of steps that overlap"


class BeforeTrial(NamedTuple):
    """The plan for ranks that meet, what it was made from, and the time of its steps in ms."""

    measurement: Measurement
    batch: BatchPlan
    step_ms: float


class OverlapTrial:
    """One trial. ``overlapping`` is the measurement for ranks that do not meet. All calls are made on all ranks."""

    def __init__(self, run: RunSetup, overlapping: Measurement) -> None:
        self._timer, self._collectives = run.timer, run.collectives
        self.job = PlanJob(overlapping, REASON)
        self.kept: BeforeTrial | None = None
        self._plan: FreezePlan | None = None  # the plan whose steps are counted
        self._steps: list[int] = []

    def goes_on(self, job: PlanJob, planned: Planned, state: RunState) -> bool:
        """Return whether the trial runs this new plan: the plan is for this trial, and its step is short enough."""
        batch = state.batch
        return job is self.job and batch is not None and planned.step_ms <= _PAYS * batch.planned_step_ms

    def step_ms(self, state: RunState) -> float | None:
        """Count the step that has ended. Return the median step in ms once the plan in force has run its steps."""
        step, batch = state.completed_steps, state.batch
        if batch is None or batch.schedule != self.job.measurement.schedule:
            return None
        if batch.plan is not self._plan:
            self._plan, self._steps = batch.plan, []
        if step > batch.planned_at and state.phases.phase(step) is Phase.STABLE and not state.runs_as_host(step):
            self._steps.append(step)
        if len(self._steps) <= STEPS:  # a step's time ends when the next step begins
            return None
        return decide_from_all(self._collectives, self._own_ms, lambda ranks: max(ranks))

    def keep(self, state: RunState, step_ms: float) -> None:
        """Remember the plan for ranks that meet, which ran until now."""
        assert state.batch is not None
        self.kept = BeforeTrial(state.measurement, state.batch, step_ms)

    def _own_ms(self) -> float:
        self._timer.drain(wait=True)
        until_next = self._timer.until_next()
        return median(until_next[step] for step in self._steps[:STEPS][-_TIMED:] if step in until_next) or 0.0
