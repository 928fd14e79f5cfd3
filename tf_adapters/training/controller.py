"""The one loop that every host shares: warm up, monitor, plan once, freeze progressively, freeze stably.

A host adapter translates its schedule, then calls ``begin_step``, wraps every action in ``running`` and calls
``end_step``. Everything that ranks must agree on happens in ``end_step``, at step numbers that are the same on
all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tf_adapters.collectives import Collectives, on_all_ranks
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ScheduleError, TimelyFreezeError
from tf_adapters.log import announce
from tf_adapters.masking.held_rows import HeldRows, frozen_by_all
from tf_adapters.masking.parameters import ParameterMask
from tf_adapters.masking.rows import RowMask
from tf_adapters.planner.forecast import Forecast
from tf_adapters.report.observer import MetricSink, Reporting
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.selection.masks import Mask, StageMasks
from tf_adapters.selection.rows import FrozenRows
from tf_adapters.selection.sampling import HeldValues, whole_parameters
from tf_adapters.selection.stability import StabilityChecks
from tf_adapters.selection.units import FreezeUnit, Tie
from tf_adapters.timing.memory import MemoryMeter
from tf_adapters.timing.phase import Phase
from tf_adapters.timing.timer import ActionTimer, Clock
from tf_adapters.training import messages
from tf_adapters.training.freeze_ratios import Freezing
from tf_adapters.training.plan_maker import PlanMaker, Planned
from tf_adapters.training.replanning import PlanWatch, Replanning
from tf_adapters.training.state import RunState, compatible_state


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Which framework runs the pipeline, for the report and the log."""

    name: str
    version: str


class Controller:
    """Freezing for one training run on one rank.

    Args:
        config: the settings.
        schedule: the pipeline schedule that the host runs, all ranks of it.
        units: the freezable units of every stage of the pipeline, the same on every rank.
        parameters: this rank's stages, and the parameters of each by name; every name in their units is among them.
        collectives: the group of all ranks that train together.
        clock: the clock of this rank's device.
        host: what the report calls the host.
        ties: weights that several stages hold.
        auto_warmup: warm-up steps that ``warmup_steps: "auto"`` stands for.
        metrics: called on this rank after each step with named figures (ratios in [0, 1], ms).
        held_values: what this rank holds of a parameter, as its optimizer updates it; by default ``parameters``.
        traced: whether transfers are measured on this rank's pipeline: true of one replica of the pipeline.
        row_masks: this rank's layers of which rows can be frozen, by stage; the units say how many rows they have.
    """

    def __init__(
        self,
        config: TimelyFreezeConfig,
        schedule: PipelineSchedule,
        units: Mapping[int, Sequence[FreezeUnit]],
        parameters: Mapping[int, Mapping[str, torch.nn.Parameter]],
        collectives: Collectives,
        clock: Clock,
        host: HostInfo,
        ties: Sequence[Tie] = (),
        auto_warmup: int = 0,
        metrics: MetricSink | None = None,
        held_values: HeldValues | None = None,
        traced: bool = True,
        row_masks: Mapping[int, RowMask] | None = None,
    ) -> None:
        self.config = config
        self.host = host
        self.schedule = schedule.validate()
        self.masks = StageMasks(units, config.seed, config.freeze_exclude, config.freeze_caps)
        self.timer = ActionTimer(clock)
        self.memory = MemoryMeter(_device_of(parameters))
        self.state = RunState.fresh(config, auto_warmup)
        self.parameter_masks = {stage: ParameterMask(of_stage) for stage, of_stage in parameters.items()}
        self._row_masks = row_masks or {}
        held_values = held_values or whole_parameters(parameters)
        self.stability_checks = StabilityChecks(config, self.masks.units, parameters, held_values, collectives)
        self._collectives = collectives
        self._freezing = Freezing(config, schedule, self.masks)
        self._parameters = parameters
        self._ties = {place: tie for tie in ties for place in tie}
        self._executed: list[Action] = []
        self._step_start: Any = None
        self._drawn: dict[tuple[int, int], Mask] = {}
        self._reporting = Reporting(self, collectives, metrics)
        self._planner = PlanMaker(config, collectives, traced, self.masks)
        watch = PlanWatch(config, collectives, traced, self.masks)
        self._replanning = Replanning(watch, self._planner, self._reporting.say)

    # --- what the host calls in every step -------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that runs, or runs next: the paper's t, from 1."""
        return self.state.completed_steps + 1

    @property
    def phase(self) -> Phase:
        """The phase of this step. Without a plan, steps count as monitored as long as nothing is found stable."""
        phase = self.state.phases.phase(self.step)
        waits = not self.config.plans and phase is Phase.STABLE and not any(self.state.stability.stable.values())
        return Phase.MONITORING_UPPER if waits else phase

    @property
    def in_step(self) -> bool:
        return self._step_start is not None

    def begin_step(self) -> None:
        """The host starts a training step."""
        self._executed.clear()
        self._drawn.clear()
        self.timer.drain()
        self._step_start = self.timer.start_step()

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Around an action's compute, without its communication: masks it and times it."""
        mask, phase = self.mask(action.stage, action.microbatch), self.phase
        self._executed.append(action)
        rows = self._row_masks[action.stage].frozen(mask.rows) if mask.rows else nullcontext()
        with self.parameter_masks[action.stage].frozen(mask.names), rows, self.timer.timed(phase, action, mask.share):
            yield
        self.memory.look(phase)

    def mask(self, stage: int, microbatch: int) -> Mask:
        """The mask of a microbatch on a stage in the current step."""
        key = (stage, microbatch)
        if key not in self._drawn:
            self._drawn[key] = self._freezing.mask(self.state, self.step, stage, microbatch)
        return self._drawn[key]

    def held_parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """This rank's parameters that every microbatch of the current step froze, on every stage that holds them.

        They take no update in this step: the host must leave them and their optimizer state as they are.
        """
        return tuple(
            parameters[name]
            for stage, parameters in self._parameters.items()
            for name in sorted(self._frozen_all_step(stage))
            if all(held in self._frozen_all_step(other) for other, held in self._ties.get((stage, name), ()))
        )

    def held_rows(self) -> tuple[HeldRows, ...]:
        """This rank's rows that every microbatch of the current step froze, of parameters that some freeze in part.

        They take no update either.
        """
        return tuple(
            HeldRows(self._parameters[stage][name], rows)
            for stage in self._row_masks
            for name, rows in frozen_by_all(
                self.mask(stage, microbatch) for microbatch in range(self.schedule.num_microbatches)
            ).items()
        )

    def _frozen_all_step(self, stage: int) -> frozenset[str]:
        """Names that every microbatch of the current step freezes on one stage."""
        names: frozenset[str] | None = None
        for microbatch in range(self.schedule.num_microbatches):
            frozen = frozenset(self.mask(stage, microbatch).names)
            names = frozen if names is None else names & frozen
            if not names:
                break
        return names or frozenset()

    def end_step(self) -> None:
        """The host has updated the weights. Decides, on all ranks at once, what the next step does.

        Raises TimelyFreezeError on every rank if ``on_error`` is "raise" and anything of ours failed on one.
        """
        step, phase = self.step, self.phase
        self.timer.stop_step(phase, self._step_start)
        self.memory.stop_step(phase)
        self._step_start = None
        self.state.completed_steps = step
        self._guarded(lambda: self._decide(step))
        self._reporting.publish(step, phase)

    # --- what anybody may ask --------------------------------------------------------------------------------

    @property
    def freezes(self) -> bool:
        """Whether this run freezes anything at all."""
        return self._freezing.on(self.state)

    def actual_freeze_ratio(self, step: int, action: Action) -> float:
        """AFR of an action at a step, in [0, 1] (paper section 3.3); while monitoring, its mask's."""
        return self._freezing.ratio(self.state, step, action)

    def frozen_parameters(self, step: int, stage: int, microbatch: int) -> tuple[str, ...]:
        """Names frozen on ``stage`` for ``microbatch`` at ``step``: the same on every replica and after a restart."""
        return self._freezing.mask(self.state, step, stage, microbatch).names

    def frozen_rows(self, step: int, stage: int, microbatch: int) -> tuple[FrozenRows, ...]:
        """Rows frozen there of parameters that are not frozen whole; none with ``granularity`` "tensor"."""
        return self._freezing.mask(self.state, step, stage, microbatch).rows

    @property
    def forecast(self) -> Forecast | None:
        """What the plan promises for a whole step; None before there is a plan."""
        if self.state.plan is None:
            return None
        return Forecast(self.state.unfrozen_step_ms, self.state.planned_step_ms)

    @property
    def freezable(self) -> Mapping[tuple[int, int], Action]:
        """The action that computes the weight gradients of a (stage, microbatch)."""
        return self._freezing.weight_gradients

    @property
    def report_path(self) -> Path:
        """Where rank 0 leaves the report."""
        return self._reporting.path

    def announce_start(self) -> None:
        """Log the line that says that freezing is on, and what will happen when."""
        self._reporting.say_start()

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs, as plain JSON values; the same on every rank."""
        return self.state.to_json(self.config, self.schedule, self.masks)

    def load_state_dict(self, data: Mapping[str, Any] | None, auto_warmup: int = 0) -> None:
        """Resume. Called on all ranks; rank 0's data counts. A plan that does not fit this run is made anew."""
        chosen = self._collectives.broadcast(data)
        self.state = compatible_state(chosen, self.config, self.schedule, self.masks, auto_warmup)
        self._forget_measured()
        description = self.state.phases.description(self.step)
        self._reporting.say(f"resumed after step {self.state.completed_steps}: {description}")
        for note in self.state.notes if self.state.plan is None else ():
            self._reporting.say(note)
        if self.state.awaits_plan:
            self._guarded(lambda: self._start_plan(self.state.completed_steps))

    def reschedule(self, schedule: PipelineSchedule) -> None:
        """The host runs another schedule from here on (another number of microbatches, say): monitor and plan anew."""
        self.schedule = schedule.validate()
        self._freezing = Freezing(self.config, schedule, self.masks)
        stability = self.state.stability
        self.state = self.state.restarted(self.config, "the pipeline schedule changed")
        self.state.stability = stability  # of the same parameters
        self._forget_measured()
        again = f": monitoring again from step {self.step}" if self.config.plans else ""
        self._reporting.say(f"the pipeline schedule changed{again}")

    def _forget_measured(self) -> None:
        """What was timed, and a plan that is being made from it, are of another run or schedule."""
        self._planner.close()
        self._replanning.forget()
        self.timer.clear()
        self.memory.clear()

    def close(self) -> None:
        """End of freezing on this rank. Called on all ranks at the same point: leaves the final report."""
        unplanned = not self.config.plans and self.state.completed_steps > self.state.phases.warmup_end
        self._planner.close()
        if self.state.plan is not None or unplanned:
            self._reporting.write()

    # --- decisions at step boundaries ------------------------------------------------------------------------

    def _decide(self, step: int) -> None:
        if self.state.failure:
            return
        phases = self.state.phases
        if step == phases.warmup_end + 1:
            self._verify_schedule()
        if phases.phase(step).monitors:
            self._reporting.say_monitoring(step)
        if self.config.plans and self._monitoring_ends(step):
            self.state.phases = phases.monitored_until(step)
            self._measure()
            self._start_plan(step)
        elif self.state.awaits_plan:
            self._take(self._planner.poll(self.schedule, self.state.measured), step)
        elif step > phases.monitoring_end and self._reporting.is_due(step):
            self._reporting.write()
        self._keep_plan(step)
        self._check_stability(step)
        if self.state.phases.description(step + 1) != phases.description(step):
            self._reporting.say_phase(step + 1)

    def _verify_schedule(self) -> None:
        """What really ran on each rank in the first monitored step must be what the schedule says."""
        executed = on_all_ranks(self._collectives, lambda: tuple(self._executed))
        ran = {self.schedule.rank_of(actions[0].stage): actions for actions in executed if actions}
        wrong = [actions for actions in executed if not actions or actions not in self.schedule.ranks]
        if wrong:
            rows = PipelineSchedule(tuple(ran.get(rank, ()) for rank in range(len(self.schedule.ranks))))
            raise ScheduleError(
                "what the ranks ran is not the schedule that they were to run. They ran:\n"
                f"{rows.grid()}\nThe schedule is:\n{self.schedule.grid()}"
            )

    def _monitoring_ends(self, step: int) -> bool:
        """Whether everything is measured: at the set length, or where every step trains as soon as it is precise."""
        phases = self.state.phases
        if step == phases.monitoring_end:
            return True
        if not phases.may_end_monitoring(step):
            return False
        error = self._planner.precision(self.timer)
        ends = error <= self.config.monitoring_precision
        if ends:
            self._reporting.say(messages.precise(step - phases.warmup_end, error))
        return ends

    def _measure(self) -> None:
        measured = self._planner.measure(self.schedule, self.timer)
        self.state.measure(measured)
        for note in measured.notes:
            self._reporting.say(note)

    def _start_plan(self, step: int) -> None:
        self._take(self._planner.start(self.schedule, self.state.measured), step)

    def _take(self, planned: Planned | None, step: int) -> None:
        """Freezing begins after ``step`` if the plan is there, else after the next one at the earliest."""
        if planned is None:
            self.state.phases = self.state.phases.planned_after(step + 1)
            return
        self.state.phases = self.state.phases.planned_after(step)
        self._adopt(planned)

    def _adopt(self, planned: Planned) -> None:
        self.state.adopt(planned)
        self._reporting.say_plan(planned.notes)
        self._reporting.write()

    def _keep_plan(self, step: int) -> None:
        """Make the plan anew where the times that it is made for are no longer the times that are measured."""
        if not self.freezes:
            return
        renewed = self._replanning.after(step, self.schedule, self.timer, self.state)
        if renewed is not None:
            self.state.measure(renewed.measured)
            self._adopt(renewed.planned)

    def _check_stability(self, step: int) -> None:
        """Find out what is stable, where the method asks and a check is due."""
        start, before = self.state.phases.monitoring_end, self.state.stability
        if not self.freezes or not self.stability_checks.due(step, start):
            return
        after = self.stability_checks.run(before, step, start)
        if not self.config.plans and not self.state.unfrozen_step_ms and any(after.stable.values()):
            self.state.unfrozen_step_ms = self._slowest_step_ms(Phase.MONITORING_UPPER)
        self.state.stability = after
        if after.checks > before.checks:
            shares = {stage: self.masks.share(stage, units) for stage, units in after.stable.items()}
            self._reporting.say(messages.checked(after, self.config, shares))

    def _slowest_step_ms(self, phase: Phase) -> float:
        """The median step of the rank where it is longest; called on all ranks."""

        def median_ms() -> float:
            self.timer.drain()
            return self.timer.step_ms(phase) or 0.0

        return max(on_all_ranks(self._collectives, median_ms))

    def _guarded(self, decide: Callable[[], None]) -> None:
        """An error has reached every rank: raise it on all, or train on without freezing on all."""
        try:
            decide()
        except TimelyFreezeError as error:
            self._fail(error)

    def _fail(self, error: TimelyFreezeError) -> None:
        self._planner.close()
        self.state.failure = str(error)
        if self.config.on_error == "raise":
            raise error
        announce(self._collectives.rank, f"{error}; training goes on without freezing", logging.WARNING)


def _device_of(parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> torch.device:
    devices = (parameter.device for of_stage in parameters.values() for parameter in of_stage.values())
    return next(devices, torch.device("cpu"))
