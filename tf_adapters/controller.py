"""The one loop that every host shares: warm up, monitor, plan once, freeze progressively, freeze stably.

A host adapter translates its schedule, then calls ``begin_step``, wraps every action in ``running`` and calls
``end_step``. Everything that ranks must agree on happens in ``end_step``, at step numbers that are the same on
all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tf_adapters import messages
from tf_adapters.bounds import local_bounds, merge_bounds
from tf_adapters.collectives import Collectives, on_all_ranks, on_one_rank
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ScheduleError, TimelyFreezeError
from tf_adapters.ir import Action, PipelineSchedule
from tf_adapters.log import announce
from tf_adapters.masking import ParameterMask
from tf_adapters.masks import NOTHING_FROZEN, Mask, StageMasks
from tf_adapters.phases import Phase
from tf_adapters.planner import FreezePlan, plan
from tf_adapters.prediction import Forecast, disappears, forecast
from tf_adapters.report.build import build_report, local_measurements
from tf_adapters.state import RunState, compatible_state
from tf_adapters.timing import ActionTimer, Clock
from tf_adapters.units import FreezeUnit, Tie

_STAGE_0_MONITORING_RATIO = 0.8  # far along the line, yet short of its end

MetricSink = Callable[[Mapping[str, float]], None]


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
    ) -> None:
        self.config = config
        self.host = host
        self.schedule = schedule.validate()
        self.masks = StageMasks(units, config.seed)
        self.timer = ActionTimer(clock)
        self.state = RunState.fresh(config, auto_warmup)
        self.parameter_masks = {stage: ParameterMask(of_stage) for stage, of_stage in parameters.items()}
        self._collectives = collectives
        self._metrics = metrics
        self._backward = _weight_gradient_actions(schedule)
        self._parameters = parameters
        self._ties = {place: tie for tie in ties for place in tie}
        self._executed: list[Action] = []
        self._step_start: Any = None
        self._drawn: dict[tuple[int, int], Mask] = {}
        self._forecast: tuple[FreezePlan, Forecast] | None = None

    # --- what the host calls in every step -------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that runs, or runs next: the paper's t, from 1."""
        return self.state.completed_steps + 1

    @property
    def phase(self) -> Phase:
        return self.state.phases.phase(self.step)

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
        mask = self.mask(action.stage, action.microbatch)
        self._executed.append(action)
        with self.parameter_masks[action.stage].frozen(mask.names), self.timer.timed(self.phase, action, mask.share):
            yield

    def mask(self, stage: int, microbatch: int) -> Mask:
        """The mask of a microbatch on a stage in the current step."""
        key = (stage, microbatch)
        if key not in self._drawn:
            self._drawn[key] = self._draw(self.step, stage, microbatch)
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

    def end_step(self) -> None:
        """The host has updated the weights. Decides, on all ranks at once, what the next step does.

        Raises TimelyFreezeError on every rank if ``on_error`` is "raise" and anything of ours failed on one.
        """
        step, phase = self.step, self.phase
        self.timer.stop_step(phase, self._step_start)
        self._step_start = None
        self.state.completed_steps = step
        try:
            self._decide(step)
        except TimelyFreezeError as error:
            self._fail(error)
        self._publish(step, phase)

    # --- what anybody may ask --------------------------------------------------------------------------------

    @property
    def freezes(self) -> bool:
        """Whether this run freezes anything at all."""
        return not self.state.failure and self.config.method != "none" and self.config.max_freeze_ratio > 0

    def actual_freeze_ratio(self, step: int, action: Action) -> float:
        """AFR of an action at a step, in [0, 1] (paper section 3.3); during lower-bound monitoring, its mask's."""
        if not self.freezes or not action.freezable:
            return 0.0
        if self.state.phases.phase(step) is Phase.MONITORING_LOWER:
            return self._monitoring_ratio(action)
        if self.state.plan is None:
            return 0.0
        return self.state.plan.freeze_ratio[action] * self.state.phases.ramp(step)

    def frozen_parameters(self, step: int, stage: int, microbatch: int) -> tuple[str, ...]:
        """Names frozen on ``stage`` for ``microbatch`` at ``step``: the same on every replica and after a restart."""
        return self._draw(step, stage, microbatch).names

    @property
    def forecast(self) -> Forecast | None:
        """What the plan promises for a whole step; None before there is a plan."""
        plan = self.state.plan
        if plan is None:
            return None
        if self._forecast is None or self._forecast[0] is not plan:  # asked for in every step, the same for one plan
            self._forecast = plan, forecast(self.schedule, plan, self.state.unfrozen_step_ms)
        return self._forecast[1]

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs, as plain JSON values; the same on every rank."""
        return self.state.to_json(self.config, self.schedule, self.masks)

    def load_state_dict(self, data: Mapping[str, Any] | None, auto_warmup: int = 0) -> None:
        """Resume. Called on all ranks; rank 0's data counts. A plan that does not fit this run is made anew."""
        chosen = self._collectives.broadcast(data)
        self.state = compatible_state(chosen, self.config, self.schedule, self.masks, auto_warmup)
        self.timer.clear()
        self._announce(f"resumed after step {self.state.completed_steps}: {self.phase.description}")
        for note in self.state.notes if self.state.plan is None else ():
            self._announce(note)

    def reschedule(self, schedule: PipelineSchedule) -> None:
        """The host runs another schedule from here on (another number of microbatches, say): monitor and plan anew."""
        self.schedule = schedule.validate()
        self._backward = _weight_gradient_actions(schedule)
        self.state = self.state.restarted(self.config, "the pipeline schedule changed")
        self.timer.clear()
        self._announce(f"the pipeline schedule changed: monitoring again from step {self.step}")

    def close(self) -> None:
        """End of freezing on this rank. Called on all ranks at the same point: leaves the final report."""
        if self.state.plan is not None:
            self._write_report()

    # --- masks -----------------------------------------------------------------------------------------------

    def _draw(self, step: int, stage: int, microbatch: int) -> Mask:
        action = self._backward.get((stage, microbatch))
        if action is None:
            return NOTHING_FROZEN
        return self.masks.draw(step, stage, microbatch, self.actual_freeze_ratio(step, action))

    def _monitoring_ratio(self, action: Action) -> float:
        """Stage 0 is not frozen whole: its backward would disappear, a bound that no mask of the plan reaches."""
        return _STAGE_0_MONITORING_RATIO if disappears(action) else 1.0

    def _frozen_all_step(self, stage: int) -> frozenset[str]:
        """Names that every microbatch of the current step freezes on one stage."""
        names: frozenset[str] | None = None
        for microbatch in range(self.schedule.num_microbatches):
            frozen = frozenset(self.mask(stage, microbatch).names)
            names = frozen if names is None else names & frozen
            if not names:
                break
        return names or frozenset()

    # --- decisions at step boundaries ------------------------------------------------------------------------

    def _decide(self, step: int) -> None:
        if self.state.failure:
            return
        phases = self.state.phases
        if step == phases.warmup_end + 1:
            self._verify_schedule()
        if phases.phase(step).monitors:
            self._announce_monitoring(step)
        if step == phases.monitoring_end:
            self._make_plan()
        elif step > phases.monitoring_end and self._report_is_due(step):
            self._write_report()
        if phases.phase(step + 1) is not phases.phase(step):
            self._announce_phase(step + 1)

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

    def _make_plan(self) -> None:
        def measure() -> tuple[dict[Action, Any], float]:
            self.timer.drain(wait=True)
            return local_bounds(self.timer), self.timer.step_ms(Phase.MONITORING_UPPER) or 0.0

        measured = on_all_ranks(self._collectives, measure)

        def solve() -> Any:
            bounds, notes = merge_bounds(self.schedule, [bounds for bounds, _ in measured])
            solved = plan(
                self.schedule,
                bounds,
                self.config.max_freeze_ratio,
                time_limit_s=self.config.solver_time_limit_s,
            )
            return solved, bounds, notes

        solved, bounds, notes = on_one_rank(self._collectives, solve)
        self.state.adopt(solved, bounds, max(step_ms for _, step_ms in measured), notes)
        self._announce_plan(notes)
        self._write_report()

    def _report_is_due(self, step: int) -> bool:
        stable = step - self.state.phases.progressive_end
        return stable == 10 or (stable > 0 and stable % self.config.report_every == 0)

    def _write_report(self) -> None:
        """Leave the report on rank 0. A disk that is full is no reason to stop freezing."""
        try:
            measured = on_all_ranks(self._collectives, lambda: local_measurements(self.timer))
            on_one_rank(self._collectives, lambda: build_report(self, measured).write(self.report_path))
        except TimelyFreezeError as error:
            announce(self._collectives.rank, f"the report could not be written: {error}", logging.WARNING)

    @property
    def report_path(self) -> Path:
        """Where rank 0 leaves the report."""
        return Path(self.config.output_dir) / "timely_freeze" / "report.json"

    def _fail(self, error: TimelyFreezeError) -> None:
        """The same error has reached every rank: raise it on all, or train on without freezing on all."""
        self.state.failure = str(error)
        if self.config.on_error == "raise":
            raise error
        announce(self._collectives.rank, f"{error}; training goes on without freezing", logging.WARNING)

    # --- what the user sees ----------------------------------------------------------------------------------

    def _announce(self, text: str) -> None:
        announce(self._collectives.rank, text)

    def announce_start(self) -> None:
        """The line that says that freezing is on, and what will happen when."""
        host = f"{self.host.name} {self.host.version}"
        self._announce(messages.enabled(host, self.schedule, self.config, self.state.phases))

    def _announce_phase(self, step: int) -> None:
        self._announce(f"step {step}: {self.state.phases.phase(step).description}")

    def _announce_monitoring(self, step: int) -> None:
        done, length = step - self.state.phases.warmup_end, self.state.phases.monitoring_steps
        if done % max(1, length // 4) == 0:
            self.timer.drain()
            step_ms = self.timer.step_ms(self.state.phases.phase(step))
            self._announce(messages.monitoring(done, length, step_ms))

    def _announce_plan(self, notes: Sequence[str]) -> None:
        plan, expected = self.state.plan, self.forecast
        assert plan is not None
        assert expected is not None
        for line in (messages.planned(plan, expected), *notes):
            self._announce(line)

    def _publish(self, step: int, phase: Phase) -> None:
        if self._metrics is None:
            return
        ratios: dict[int, list[float]] = {stage: [] for stage in self.masks.stages}
        for (stage, _), action in self._backward.items():
            ratios[stage].append(self.actual_freeze_ratio(step, action))
        figures = {f"afr_stage_{s}": sum(rs) / len(rs) if rs else 0.0 for s, rs in ratios.items()}
        last = self.timer.last_step_ms(phase)
        if last is not None:
            figures["step_ms"] = last
        if self.forecast is not None:
            figures["planned_step_ms"] = self.forecast.planned_ms
        self._metrics(figures)


def _weight_gradient_actions(schedule: PipelineSchedule) -> dict[tuple[int, int], Action]:
    return {(action.stage, action.microbatch): action for action in schedule.actions if action.freezable}
