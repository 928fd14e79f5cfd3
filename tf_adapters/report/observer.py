"""What is seen of a run: lines in the log, figures after every step, the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tf_adapters.collectives import Collectives, on_all_ranks, on_one_rank
from tf_adapters.errors import TimelyFreezeError
from tf_adapters.log import announce
from tf_adapters.report.build import LocalMeasurements, build_report, local_measurements
from tf_adapters.timing.phase import Phase
from tf_adapters.training import messages

if TYPE_CHECKING:
    from tf_adapters.training.controller import Controller

MetricSink = Callable[[Mapping[str, float]], None]


class Reporting:
    """Tells what a controller does.

    Args:
        controller: whose run this is.
        collectives: the group of all ranks that train together; rank 0 logs and writes.
        metrics: called on this rank after each step with named figures (ratios in [0, 1], ms).
    """

    def __init__(self, controller: Controller, collectives: Collectives, metrics: MetricSink | None) -> None:
        self._controller, self._collectives, self._metrics = controller, collectives, metrics

    # --- the log -----------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        announce(self._collectives.rank, text)

    def say_start(self) -> None:
        controller = self._controller
        host = f"{controller.host.name} {controller.host.version}"
        self.say(messages.enabled(host, controller.schedule, controller.config, controller.state.phases))

    def say_phase(self, step: int) -> None:
        config = self._controller.config
        description = self._controller.state.phases.description(step)
        self.say(f"step {step}: {description if config.plans else messages.checking(config)}")

    def say_monitoring(self, step: int) -> None:
        """Four times while monitoring."""
        phases, timer = self._controller.state.phases, self._controller.timer
        done, length = step - phases.warmup_end, phases.monitoring_steps
        if done % max(1, length // 4) == 0:
            timer.drain()
            self.say(messages.monitoring(done, length, timer.step_ms(phases.phase(step))))

    def say_plan(self, notes: Sequence[str]) -> None:
        plan, expected = self._controller.state.plan, self._controller.forecast
        assert plan is not None
        assert expected is not None
        for line in (messages.planned(plan, expected), *notes):
            self.say(line)

    # --- after every step --------------------------------------------------------------------------------------

    def publish(self, step: int, phase: Phase) -> None:
        """Give the figures of a step that has ended to whoever asked for them."""
        if self._metrics is None:
            return
        controller = self._controller
        ratios: dict[int, list[float]] = {stage: [] for stage in controller.masks.stages}
        for (stage, _), action in controller.freezable.items():
            ratios[stage].append(controller.actual_freeze_ratio(step, action))
        figures = {f"afr_stage_{s}": sum(rs) / len(rs) if rs else 0.0 for s, rs in ratios.items()}
        last = controller.timer.last_step_ms(phase)
        if last is not None:
            figures["step_ms"] = last
        if controller.forecast is not None:
            figures["planned_step_ms"] = controller.forecast.planned_ms
        self._metrics(figures)

    # --- the report --------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Where rank 0 leaves the report."""
        return Path(self._controller.config.output_dir) / "timely_freeze" / "report.json"

    def is_due(self, step: int) -> bool:
        """Whether the report is to be brought up to date after ``step``."""
        stable = step - self._controller.state.phases.progressive_end
        return stable == 10 or (stable > 0 and stable % self._controller.config.report_every == 0)

    def write(self) -> None:
        """Leave the report. Called on all ranks. A disk that is full is no reason to stop freezing."""
        try:
            measured = on_all_ranks(self._collectives, self._local)
            on_one_rank(self._collectives, lambda: build_report(self._controller, measured).write(self.path))
        except TimelyFreezeError as error:
            announce(self._collectives.rank, f"the report could not be written: {error}", logging.WARNING)

    def _local(self) -> LocalMeasurements:
        controller = self._controller
        return local_measurements(min(controller.parameter_masks), controller.timer, controller.memory)
