"""What happens at the end of a step: everything that ranks must agree on, at step numbers that are the same on all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tf_adapters.collectives import Collectives, decide_from_all
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ScheduleError, TimelyFreezeError
from tf_adapters.log import announce
from tf_adapters.planner.deferred import describe_deferral
from tf_adapters.planner.forecast import Forecast
from tf_adapters.planner.frontier import describe_frontier
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.selection.masks import StageMasks
from tf_adapters.selection.stability import StabilityChecks
from tf_adapters.timing.phase import Phase
from tf_adapters.timing.timer import ActionTimer
from tf_adapters.training import batch_words, messages
from tf_adapters.training.observer import Observer, RunSnapshot
from tf_adapters.training.pipeline import HostPipeline
from tf_adapters.training.plan_maker import PlanMaker, Planned, Probes
from tf_adapters.training.replanning import PlanWatch, Replanning

__all__ = ["Decisions"]


class Decisions:
    """Brings a run's state up to date at step boundaries. Every method is called on all ranks at the same point.

    Args:
        config: the settings.
        masks: the masks of every stage.
        checks: stability checks, where the method asks for them.
        collectives: the group of all ranks that train together.
        pipeline: the pipeline that the host runs.
        probes: this rank's newest probes of its gradients' noise, by stage.
        observer: told where there is something new to report.
    """

    def __init__(
        self,
        config: TimelyFreezeConfig,
        masks: StageMasks,
        checks: StabilityChecks,
        collectives: Collectives,
        pipeline: HostPipeline,
        probes: Probes,
        observer: Observer | None,
    ) -> None:
        self._config, self._masks, self._checks = config, masks, checks
        self._collectives, self._observer = collectives, observer
        self._verified: PipelineSchedule | None = None
        self.plan_maker = PlanMaker(config, collectives, pipeline, masks, probes=probes)
        watch = PlanWatch(config, collectives, pipeline, masks, probes=probes)
        self._replanning = Replanning(watch, self.plan_maker, self.say)

    def say(self, text: str) -> None:
        """Log a line on rank 0."""
        announce(self._collectives.rank, text)

    def after_step(self, run: RunSnapshot, executed: Sequence[Action]) -> None:
        """Decide what the next step does. Raises TimelyFreezeError on every rank if ``on_error`` is "raise"."""
        self._guarded(run, lambda: self._decide(run, executed))

    def resume_planning(self, run: RunSnapshot) -> None:
        """Make the plan that a checkpoint says was still being made."""
        if run.state.awaits_plan:
            self._guarded(run, lambda: self._start_plan(run))

    def forget(self) -> None:
        """Give up a plan that is being made, and what was seen of the plan in force."""
        self.plan_maker.close()
        self._replanning.forget()

    def _decide(self, run: RunSnapshot, executed: Sequence[Action]) -> None:
        state, step = run.state, run.state.completed_steps
        if state.failure:
            return
        phases = state.phases
        self._verify(run, executed)
        if phases.phase(step).monitors:
            self._say_progress(run)
        if self._config.plans and self._monitoring_ends(run):
            state.phases = phases.monitored_until(step)
            self._measure(run)
            self._start_plan(run)
        elif state.awaits_plan:
            self._take(run, self.plan_maker.poll(run.schedule, state.measured))
        elif step > phases.monitoring_end and self._report_due(run):
            self._report(run)
        self._renew_plan(run)
        self._check_stability(run)
        if state.phases.description(step + 1) != phases.description(step):
            self.say(f"step {step + 1}: {messages.phase(self._config, state.phases, step + 1)}")

    def _verify(self, run: RunSnapshot, executed: Sequence[Action]) -> None:
        """Once of every order: of the host's own after the warm-up, of a plan's in its first step."""
        step = run.state.completed_steps
        order = run.state.execution(run.schedule, step)
        if step == run.state.phases.warmup_end + 1 or order not in (run.schedule, self._verified):
            verify_schedule(self._collectives, order, executed)
            self._verified = order

    def _say_progress(self, run: RunSnapshot) -> None:
        """Four times while monitoring."""
        phases, step = run.state.phases, run.state.completed_steps
        done, length = step - phases.warmup_end, phases.monitoring_steps
        if done % max(1, length // 4) == 0:
            run.timer.drain()
            self.say(messages.monitoring(done, length, run.timer.step_ms(phases.phase(step))))

    def _monitoring_ends(self, run: RunSnapshot) -> bool:
        """Whether everything is measured: at the set length, or where every step trains as soon as it is precise."""
        phases, step = run.state.phases, run.state.completed_steps
        if step == phases.monitoring_end:
            return True
        if not phases.may_end_monitoring(step):
            return False
        error = self.plan_maker.precision(run.timer)
        ends = error <= self._config.monitoring_precision
        if ends:
            self.say(messages.precise(step - phases.warmup_end, error))
        return ends

    def _measure(self, run: RunSnapshot) -> None:
        measured = self.plan_maker.measure(run.schedule, run.timer)
        run.state.measure(measured)
        for note in measured.notes:
            self.say(note)
        if measured.batch is not None:
            self.say(batch_words.log_line(measured.batch, measured.unfrozen_step_ms))

    def _start_plan(self, run: RunSnapshot) -> None:
        self._take(run, self.plan_maker.start(run.schedule, run.state.measured))

    def _take(self, run: RunSnapshot, planned: Planned | None) -> None:
        """Freezing begins after this step if the plan is there, else after the next one at the earliest."""
        state = run.state
        if planned is None:
            state.phases = state.phases.planned_after(state.completed_steps + 1)
            return
        state.phases = state.phases.planned_after(state.completed_steps)
        self._adopt(run, planned)

    def _adopt(self, run: RunSnapshot, planned: Planned) -> None:
        state = run.state
        state.adopt(planned)
        if planned.plan.deferrable_share:
            self.say(f"deferral: {describe_deferral(planned.plan, run.schedule)}")
        if planned.plan.frontier:
            self.say(f"max_freeze_ratio auto: {describe_frontier(planned.plan)}")
        for line in (messages.planned(planned.plan, Forecast(state.unfrozen_step_ms, planned.step_ms)), *planned.notes):
            self.say(line)
        self._report(run)

    def _renew_plan(self, run: RunSnapshot) -> None:
        """Make the plan anew where the times it was made for are no longer the times that are measured."""
        if not run.ratios.on(run.state) and not self._config.defers:
            return
        renewed = self._replanning.after(run.state.completed_steps, run.schedule, run.timer, run.state)
        if renewed is not None:
            run.state.measure(renewed.measured)
            self._adopt(run, renewed.planned)

    def _check_stability(self, run: RunSnapshot) -> None:
        """Find out what is stable, where the method asks and a check is due."""
        state, step = run.state, run.state.completed_steps
        start, before = state.phases.monitoring_end, state.stability
        if not run.ratios.on(state) or not self._checks.due(step, start):
            return
        after = self._checks.run(before, step, start)
        if not self._config.plans and not state.unfrozen_step_ms and any(after.stable.values()):
            state.unfrozen_step_ms = self._slowest_unfrozen_ms(run.timer)
        state.stability = after
        if after.checks > before.checks:
            shares = {stage: self._masks.share(stage, units) for stage, units in after.stable.items()}
            self.say(messages.checked(after, self._config, shares))

    def _slowest_unfrozen_ms(self, timer: ActionTimer) -> float:
        """The median unfrozen step of the rank where it is longest."""

        def median_ms() -> float:
            timer.drain()
            return timer.step_ms(Phase.MONITORING_UPPER) or 0.0

        return decide_from_all(self._collectives, median_ms, lambda steps_ms: max(steps_ms))

    def _report_due(self, run: RunSnapshot) -> bool:
        stable = run.state.completed_steps - run.state.phases.progressive_end
        return stable == 10 or (stable > 0 and stable % self._config.report_every == 0)

    def _report(self, run: RunSnapshot) -> None:
        if self._observer is not None:
            self._observer.report(run)

    def _guarded(self, run: RunSnapshot, decide: Callable[[], None]) -> None:
        """An error has reached every rank: raise it on all, or train on without freezing on all."""
        try:
            decide()
        except TimelyFreezeError as error:
            self.plan_maker.close()
            run.state.failure = str(error)
            self._report(run)
            if self._config.on_error == "raise":
                raise
            announce(self._collectives.rank, f"{error}; training goes on without freezing", logging.WARNING)


def verify_schedule(collectives: Collectives, schedule: PipelineSchedule, executed: Sequence[Action]) -> None:
    """Raise ScheduleError, on all ranks, where what a rank ran in a step is not what the schedule says.

    A weight gradient may have run earlier than planned, where the host wanted to reduce it.
    """
    expected = [_without_weights(row) for row in schedule.ranks]

    def local() -> int | tuple[Action, ...]:
        """The row of the schedule that this rank ran, or what it ran instead."""
        actions = tuple(executed)
        row = _without_weights(actions)
        return expected.index(row) if actions and row in expected else actions

    def check(ranks: Sequence[int | tuple[Action, ...]]) -> None:
        if all(isinstance(row, int) for row in ranks):
            return
        by_rank = [schedule.ranks[row] if isinstance(row, int) else row for row in ranks]
        ran = {schedule.rank_of(actions[0].stage): actions for actions in by_rank if actions}
        rows = PipelineSchedule(tuple(ran.get(rank, ()) for rank in range(len(schedule.ranks))))
        raise ScheduleError(
            f"the ranks did not run the schedule. They ran:\n{rows.grid()}\nThe schedule is:\n{schedule.grid()}"
        )

    decide_from_all(collectives, local, check)


def _without_weights(row: Sequence[Action]) -> tuple[tuple[Action, ...], frozenset[Action]]:
    """A row's weight gradients apart from the actions whose order neighbours depend on."""
    weights = frozenset(action for action in row if action.kind is Kind.WEIGHT_GRAD)
    return tuple(action for action in row if action not in weights), weights
