"""The end of a step: decisions that all ranks must agree on, at step numbers that are equal on all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from tf_adapters.collectives import decide_from_all
from tf_adapters.errors import TimelyFreezeError
from tf_adapters.log import announce
from tf_adapters.measuring.control_steps import EARLY_KNOWN, NEIGHBOURS, Speedup, is_control, speedup
from tf_adapters.measuring.estimates import median
from tf_adapters.measuring.phase import LAYER_STEPS, Phase
from tf_adapters.planner.deferred import describe_deferral
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.selection.stability import StabilityChecks
from tf_adapters.training import batch_words, log_lines, tap_findings
from tf_adapters.training.batches import most_seen
from tf_adapters.training.overlap_trial import REASON, OverlapTrial
from tf_adapters.training.peak_memory import peak_memory_line
from tf_adapters.training.plan_maker import PlanJob, PlanMaker, Planned, RunSetup
from tf_adapters.training.replanning import Replanning
from tf_adapters.training.state import RunState
from tf_adapters.training.tap_findings import TapFindings
from tf_adapters.training.verification import verify_schedule


class Decisions:
    """Brings a run's state up to date at step boundaries. Every method is called on all ranks at the same point."""

    def __init__(self, setup: RunSetup, checks: StabilityChecks, report: Callable[[], None]) -> None:
        self._config, self._masks, self._collectives = setup.config, setup.masks, setup.collectives
        self._pipeline, self._timer = setup.pipeline, setup.timer
        self._checks, self._report = checks, report
        self._verified: dict[int, PipelineSchedule | None] = {}  # by number of microbatches; None: the host's own order
        self._monitored: list[PipelineSchedule] = []  # of each monitored step that froze nothing
        self._unplanned: set[int] = set()  # numbers of microbatches that no plan could be made for
        self.plan_maker = PlanMaker(setup)
        self._replanning = Replanning(setup)
        self._setup = setup
        self._meets_clearly = True  # or the monitored steps were clear, whether ranks meet between steps or not
        self._trial: OverlapTrial | None = None

    def say(self, text: str) -> None:
        announce(self._collectives.rank, text)

    def after_step(self, state: RunState, executed: Sequence[Action] | None) -> None:
        """Decide what the next step does. Raises TimelyFreezeError on every rank if ``on_error`` is "raise"."""
        self._guarded(state, lambda: self._decide(state, executed))

    def check_taps(self, state: RunState, whole: bool, accumulates_early: bool) -> None:
        """After a step that checked the taps: leave to the host the layers that no tap understands.

        ``whole`` says that the step has checked all layers, ``accumulates_early`` that a forward or a loss of this rank
        has accumulated gradients.
        """
        taps = self._pipeline.taps
        if state.failure:  # nothing is planned any more
            for of_stage in taps.values():
                of_stage.end_check()
        else:
            self._guarded(state, lambda: self._take_findings(state, whole, accumulates_early))

    def _take_findings(self, state: RunState, whole: bool, accumulates_early: bool) -> None:
        before, step = state.taps, state.completed_steps
        findings = tap_findings.agree(self._collectives, self._pipeline, accumulates_early)
        first_step = step if before is None else before.first_step
        good_step = step if whole or before is None else before.good_step
        state.taps = findings = replace(findings, first_step=first_step, good_step=good_step)
        findings.apply(self._pipeline.taps, self._masks)
        self.plan_maker.keeps_forwards = findings.keeps_forwards
        self.plan_maker.keeps_stages = findings.keeps_stages
        self._give_up_moved_forwards(state)
        if before is not None:
            for line in findings.changed_lines(before):
                text = f"step {step}: {line}"
                state.note(text)
                announce(self._collectives.rank, text, logging.WARNING)
            return
        for line in findings.lines():
            state.note(line)
            self.say(line)
        if share := findings.described():
            self.say(share)

    def resume_planning(self, state: RunState) -> None:
        """Make the plan that a checkpoint says was still being made."""
        if state.awaits_plan:
            self._guarded(state, lambda: self._start(state, PlanJob(state.measured_for(state.schedule))))

    def forget(self) -> None:
        """Give up a plan that is being made, and what was seen of the pipeline and of plans in force."""
        self.plan_maker.close()
        self._replanning.forget()
        self._trial = None
        for seen in (self._verified, self._monitored, self._unplanned):
            seen.clear()

    def _decide(self, state: RunState, executed: Sequence[Action] | None) -> None:
        step = state.completed_steps
        state.plans.used(state.microbatches)
        if state.failure:
            return
        phases = state.phases
        self._verify(state, executed)
        if phases.phase(step).monitors:
            self._say_progress(state)
        if phases.phase(step) is Phase.MONITORING_UPPER:
            self._monitored.append(state.schedule)
        if self._config.plans and self._monitoring_ends(state):
            state.phases = phases.monitored_until(step)
            self._measure(state)
            self._start(state, PlanJob(state.measurement))
        elif (job := self.plan_maker.job) is not None:
            self._take(state, job, self.plan_maker.poll)
        self._compare_with_host(state)
        self._try_overlap(state)
        stable = step - state.phases.progressive_end
        if stable in (10, EARLY_KNOWN) or (stable > 0 and stable % self._config.replan_interval == 0):
            self._report()
        self._renew_plan(state)
        self._plan_batch(state)
        self._check_stability(state)
        if state.phases.description(step + 1) != phases.description(step):
            self.say(f"step {step + 1}: {log_lines.phase(self._config, state, step + 1)}")

    def _verify(self, state: RunState, executed: Sequence[Action] | None) -> None:
        """Check each order once: the host's own after the warm-up, a plan's in its first step."""
        step, number = state.completed_steps, state.microbatches
        if executed is None or state.runs_as_host(step):  # the first: it ran before a resume. All ranks agree on both
            return
        order = state.execution(step)
        rewritten = None if order is state.schedule else order
        if step > state.phases.warmup_end and self._verified.get(number, state.schedule) != rewritten:
            verify_schedule(self._collectives, order, executed)
            self._verified[number] = rewritten

    def _say_progress(self, state: RunState) -> None:
        """Log the progress of monitoring, four times in all."""
        phases, step = state.phases, state.completed_steps
        done, length = step - phases.warmup_end, phases.monitoring_end - phases.warmup_end
        if done % max(1, length // 4) == 0:
            self._timer.drain()
            step_ms = self._timer.step_ms(phases.phase(step))
            self.say(f"monitoring {done}/{length} steps" + ("" if step_ms is None else f", {step_ms:.1f} ms a step"))

    def _monitoring_ends(self, state: RunState) -> bool:
        """Return whether monitoring ends: after its set length, or as soon as its times are precise enough."""
        phases, step = state.phases, state.completed_steps
        if step == phases.monitoring_end:
            return True
        if not phases.may_end_monitoring(step):
            return False
        error = self.plan_maker.precision(most_seen(self._monitored or [state.schedule]))
        ends = error <= self._config.monitoring_precision
        if ends:
            steps = step - phases.warmup_end
            self.say(f"monitoring ended after {steps} steps: times and savings are known to {error:.1%}")
        return ends

    def _measure(self, state: RunState) -> None:
        schedule = most_seen(self._monitored or [state.schedule])
        measured = self.plan_maker.measure(schedule, state.taps or TapFindings())
        known = measured.known
        state.measure(known, measured.notes)
        for note in measured.notes:
            self.say(note)
        self._meets_clearly = not measured.own_times or bool(self._pipeline.meetings)
        if not self._meets_clearly:
            self._trial = OverlapTrial(self._setup, measured.overlapping)
        if known.batch_times is not None:
            self.say(batch_words.log_line(known.batch_times, known.unfrozen_step_ms))

    def _compare_with_host(self, state: RunState) -> None:
        """After a control step and its neighbours: leave the run to the host if planned steps are slower for sure.

        A run that freezes stays as it is, since its results must not depend on the clock.
        """
        step = state.completed_steps
        stable = step - state.phases.progressive_end
        exact = state.plan is not None and not state.plan.mean_freeze_ratio
        if state.left_to_host or not exact or stable < EARLY_KNOWN or not is_control(stable - NEIGHBOURS):
            return
        slower = decide_from_all(self._collectives, self._speedup, _slower_than_host)
        if slower is None:
            return
        self._leave_to_host(
            state,
            f"step {step}: the host alone is faster: planned steps run at {slower.value:.2f}x of its speed "
            f"({slower.low:.2f}x to {slower.high:.2f}x at 99%, {slower.steps} control steps), so every later step runs "
            "in the host's way; wider layers, more tokens in a microbatch or extra_microbatches would help",
        )
        self._report()

    def _try_overlap(self, state: RunState) -> None:
        """Go on with a trial of steps that overlap, and end it with the faster plan."""
        trial = self._trial
        if trial is None or self.plan_maker.job is not None:
            return
        if state.left_to_host:
            self._trial = None
            return
        step_ms = trial.step_ms(state)
        if step_ms is None:
            return
        if trial.kept is None:
            trial.keep(state, step_ms)
            self._start(state, trial.job)
            return
        self._trial = None
        before = trial.kept
        text = (
            f"step {state.completed_steps}: a step takes {step_ms:.1f} ms with the plan for steps that overlap and "
            f"{before.step_ms:.1f} ms with the plan for ranks that meet: the faster one stays"
        )
        if before.step_ms <= step_ms:
            batch = before.batch
            state.measure(before.measurement)
            state.adopt(batch.schedule, Planned(batch.plan, batch.planned_step_ms))
            self._timer.controls.forget(batch.schedule.num_microbatches)
        state.note(text)
        self.say(text)

    def _give_up_moved_forwards(self, state: RunState) -> None:
        """Leave the run to the host if a plan moves forwards that must keep their order."""
        if self.plan_maker.keeps_forwards and any(batch.moves_forwards for batch in state.plans.of.values()):
            self._leave_to_host(
                state,
                f"step {state.completed_steps}: the plan moves forwards, but a forward or a loss accumulates "
                "gradients, or weights change within a batch. Gradients may have differed from the host's "
                "since the plan began. Every later step runs in the host's way",
            )

    def _leave_to_host(self, state: RunState, text: str) -> None:
        """Run every step as the host alone would from here on, and say why."""
        if state.left_to_host:
            return
        state.left_to_host = True
        self.plan_maker.close()
        state.note(text)
        announce(self._collectives.rank, text, logging.WARNING)

    def _speedup(self) -> Speedup | None:
        self._timer.drain()
        return speedup(self._timer.controls.of(None), confidence=_SURE)

    def _start(self, state: RunState, job: PlanJob) -> None:
        self._take(state, job, lambda: self.plan_maker.start(job))

    def _take(self, state: RunState, job: PlanJob, make: Callable[[], Planned | None]) -> None:
        """Take the plan, if it is there.

        The first plan starts freezing with the next step. If it comes later, freezing starts later by a step at least.
        If planning fails, the existing plans stay in force. An error of the first plan is raised.
        """
        first, number = not state.plans, job.measurement.schedule.num_microbatches
        try:
            planned = make()
        except TimelyFreezeError as error:
            if job.reason:
                self._trial = None
                self.say(f"the plan stays as it is: {error}")
                return
            if first:
                raise
            self._unplanned.add(number)
            announce(
                self._collectives.rank,
                f"batches of {number} microbatches have no plan of their own: {error}",
                logging.WARNING,
            )
            return
        if first:
            state.phases = state.phases.planned_after(state.completed_steps + (planned is None))
        if planned is None:
            return
        if job.reason and self._trial is not None and not self._trial.goes_on(job, planned, state):
            self._trial = None
            if job.reason == REASON:
                return
        if job.reason:
            state.measure(job.measurement, (job.reason,))
            self._unplanned.clear()
        self._adopt(state, job.measurement.schedule, planned, renewed=bool(job.reason))
        if first or job.reason:
            self._report()

    def _adopt(self, state: RunState, schedule: PipelineSchedule, planned: Planned, *, renewed: bool) -> None:
        plan = planned.plan
        state.adopt(schedule, planned)
        self._timer.controls.forget(schedule.num_microbatches)  # they compare with the plan before
        self._give_up_moved_forwards(state)
        batch = state.plans.of[schedule.num_microbatches]
        if len(state.plans.of) > 1:
            self.say(f"batches of {schedule.num_microbatches} microbatches have a plan of their own:")
        if plan.deferrable_share:
            self.say(f"deferral: {describe_deferral(plan, schedule)}")
            line = peak_memory_line(self._setup, batch)
            if line is not None:
                self.say(line)
        host_ms = 0.0 if renewed else self._slowest_ms(Phase.WARMUP, schedule.num_microbatches, _AS_HOST)
        known, why = state.measured_for(schedule), self._pipeline.meetings
        meeting = log_lines.meeting(known, plan, why, is_clear=self._meets_clearly)
        for line in (log_lines.planned(plan, batch.forecast, host_ms), *([meeting] if meeting else []), *planned.notes):
            self.say(line)

    def _renew_plan(self, state: RunState) -> None:
        """Plan again if the most frequent batches no longer take the times of their plan."""
        step, batch = state.completed_steps, state.plans.most_used
        if self.plan_maker.job is not None or not (state.freezes(self._config) or self._config.defers):
            return
        if batch is None or state.left_to_host or not self._replanning.due(step, state.phases.progressive_end):
            return
        try:
            job = self._replanning.look(state.measured_for(batch.schedule), batch.plan)
        except TimelyFreezeError as error:
            self.say(f"the plan stays as it is: {error}")
            return
        if job is not None:
            self.say(f"step {step}: planning anew: {job.reason}")
            self._start(state, job)

    def _plan_batch(self, state: RunState) -> None:
        """Plan for batches of this number of microbatches, where there are plans for others: nothing is measured."""
        number, plans, batch = state.microbatches, state.plans, state.batch
        has_newest = batch is not None and batch.planned_at >= state.measured_at
        if (
            state.left_to_host
            or has_newest
            or not state.measurement.times
            or number in self._unplanned
            or self.plan_maker.job is not None
        ):
            return
        if plans and plans.has_room(number, state.completed_steps, self._config.replan_interval):
            self._start(state, PlanJob(state.measured_for(state.schedule)))

    def _check_stability(self, state: RunState) -> None:
        """Find out what is stable, where the method asks and a check is due."""
        step = state.completed_steps
        start, before = state.phases.monitoring_end, state.stability
        if not state.freezes(self._config) or not self._checks.due(step, start):
            return
        after = self._checks.run(before, step, start)
        if not self._config.plans and not state.measurement.unfrozen_step_ms and any(after.stable.values()):
            state.measurement = replace(state.measurement, unfrozen_step_ms=self._slowest_ms(Phase.MONITORING_UPPER))
        state.stability = after
        if after.checks > before.checks:
            shares = {stage: self._masks.share(stage, units) for stage, units in after.stable.items()}
            self.say(log_lines.checked(after, self._config, shares))

    def _slowest_ms(self, phase: Phase, microbatches: int | None = None, part: slice = slice(None)) -> float:
        """Return the median of a phase's steps, or of ``part`` of them, on the slowest rank, in ms; 0 without any."""

        def median_ms() -> float:
            self._timer.drain()
            return median(self._timer.steps_ms(phase, microbatches)[part]) or 0.0

        return decide_from_all(self._collectives, median_ms, lambda steps_ms: max(steps_ms))

    def _guarded(self, state: RunState, decide: Callable[[], None]) -> None:
        """An error has reached every rank: raise it on all, or train on as the host alone on all."""
        try:
            decide()
        except TimelyFreezeError as error:
            self.plan_maker.close()
            state.failure = str(error)
            self._report()
            if self._config.on_error == "raise":
                raise
            announce(self._collectives.rank, f"{error}; training goes on as the host alone", logging.WARNING)


_AS_HOST = slice(1, -LAYER_STEPS)
"""The warm-up's steps that run as the host alone. The first one checks taps, and the last ones time layers."""

_SURE = 0.99
"""Confidence of the interval that must lie below 1 before a run is left to the host."""


def _slower_than_host(ranks: Sequence[Speedup | None]) -> Speedup | None:
    """Return the slowest rank's speedup if its interval lies below 1.

    Return None if it does not, or if a rank has too few control steps.
    """
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks):
        return None
    slowest = max(known, key=lambda of_rank: of_rank.host_ms / of_rank.value)
    return slowest if slowest.high < 1.0 else None
