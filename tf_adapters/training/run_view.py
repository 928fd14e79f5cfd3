"""A run as its observers see it, and their protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tf_adapters.measuring.control_steps import Pair, speedup
from tf_adapters.measuring.estimates import median
from tf_adapters.measuring.layer_times import LayerTimer, StageLayers
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.timer import ActionTimer
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.training.freeze_ratios import FreezeRatios
from tf_adapters.training.plan_maker import RunSetup
from tf_adapters.training.state import RunState
from tf_adapters.training.step_masks import MaskTally
from tf_adapters.training.tap_checks import TapChecks

REPORTED = (Phase.MONITORING_UPPER, Phase.MONITORING_LOWER, Phase.MONITORING_MIXED, Phase.STABLE)
"""The phases whose times are reported."""

_SINGLE_SAMPLES = 8
"""Most points of an action whose samples all have different freeze ratios."""

Points = tuple[tuple[float, float], ...]
"""(frozen share of the stage's work in [0, 1], ms) of one action in one phase."""


@dataclass(frozen=True, slots=True)
class LocalMeasurements:
    """The measurements of one rank, by phase: median steps in ms, and the points of each freezable action.

    Ranks that are not traced have only steps and memory: the rest is the same on each replica. ``forward_ms`` holds
    the medians of stable freezing's forwards. ``stage`` is any stage of the rank, and shows its place in the
    pipeline. ``notes`` are about its own layers. ``copied_bytes``, by stage, is what the newest step copied since
    others could have changed what waits. ``compilations`` counts graphs of torch.compile. ``controls`` compare this
    rank's control steps with the planned steps around them. ``peak_bytes`` was measured, by phase;
    ``planned_peak_bytes`` is expected under the plan.
    """

    stage: int
    steps: Mapping[str, float | None]
    actions: Mapping[str, Mapping[Action, Points]]
    forward_ms: Mapping[Action, float]
    peak_bytes: Mapping[str, int | None]
    planned_peak_bytes: int | None
    frozen_share: Mapping[int, tuple[float, ...]]
    parameter_freeze_ratio: Mapping[int, Mapping[str, float]]
    layers: Mapping[int, StageLayers]
    notes: tuple[str, ...]
    copied_bytes: Mapping[int, int]
    compilations: Mapping[str, int]
    controls: tuple[Pair, ...] = ()


class RunView:
    """One run as one rank sees it. Observers get values, made when they ask, and nothing that would change the run.

    It holds no model, so that a report at the end of the process keeps none alive.
    """

    def __init__(
        self,
        setup: RunSetup,
        state: RunState,
        *,
        ratios: FreezeRatios,
        layers: LayerTimer,
        tally: MaskTally,
        checks: TapChecks,
    ) -> None:
        self.config, self.host, self.device = setup.config, setup.pipeline.host, setup.timer.device
        self.moves_forwards = setup.pipeline.moves_forwards
        self._stages, self._traced = sorted(setup.pipeline.parameters), setup.pipeline.traced
        self._masks, self._timer, self._memory = setup.masks, setup.timer, setup.memory
        self._state, self._ratios, self._layers, self._tally = state, ratios, layers, tally
        self._notes, self._copied_bytes = checks.notes, checks.copied_bytes
        self._compilations = checks.compilations

    def state(self) -> RunState:
        """Return a copy of the run's state, for the number of microbatches that most steps had."""
        return self._state.of_most_used()

    def figures(self) -> dict[str, float]:
        """Return the figures of the newest step: actual freeze ratios in [0, 1] by stage, and times in ms.

        ``step_ms`` is of the newest step that the device has finished: waiting for it would slow training down.
        """
        figures = {}
        for stage in self._masks.stages:
            masks = self._ratios.masks(self._state, self._state.completed_steps, stage)
            figures[f"afr_stage_{stage}"] = sum(mask.share for mask in masks) / len(masks) if masks else 0.0
        self._timer.drain()
        if self._timer.newest_step_ms is not None:
            figures["step_ms"] = self._timer.newest_step_ms
        if self._state.forecast is not None:
            figures["planned_step_ms"] = self._state.forecast.planned_ms
        measured = speedup(self._timer.controls.of(self._reported_microbatches))
        if measured is not None:
            figures |= {"host_step_ms": measured.host_ms, "speedup": measured.value}
        return figures

    def stable_steps_ms(self) -> tuple[float, ...]:
        """Durations of this rank's newest steps of stable freezing, ms: those that are reported."""
        return self._timer.steps_ms(Phase.STABLE, self._reported_microbatches)

    def local_measurements(self) -> LocalMeasurements:
        timer, batch = self._timer, self._state.plans.most_used
        number = self._reported_microbatches
        timer.drain()
        return LocalMeasurements(
            stage=self._stages[0],
            steps={phase.value: timer.step_ms(phase, number) for phase in REPORTED},
            actions={phase.value: _points(timer, phase, number) if self._traced else {} for phase in REPORTED},
            forward_ms=_forwards(timer, number) if self._traced else {},
            peak_bytes={phase.value: self._memory.peak_bytes(phase) for phase in REPORTED},
            planned_peak_bytes=batch.planned_peak_bytes(self._memory, self._stages[0]) if batch else None,
            frozen_share=self._tally.frozen_share() if self._traced else {},
            parameter_freeze_ratio=self._tally.parameter_freeze_ratio() if self._traced else {},
            layers=self._layers.times() if self._traced else {},
            notes=tuple(self._notes),
            copied_bytes=dict(self._copied_bytes),
            compilations=dict(self._compilations),
            controls=timer.controls.of(number),
        )

    @property
    def _reported_microbatches(self) -> int | None:
        """The number of microbatches of the steps that are reported; None if all are."""
        batch = self._state.plans.most_used
        return None if batch is None else batch.schedule.num_microbatches


class Observer(Protocol):
    """Looks at a run. An observer must not raise: training goes on whatever happens to it."""

    def step_ended(self, run: RunView) -> None:
        """Called on each rank after each of its steps. The run's state is still the one that the step ran with."""

    def report(self, run: RunView) -> None:
        """Called on all ranks at the same point, where there is something new to report."""

    def close(self, run: RunView) -> None:
        """Called on all ranks at the same point: the run is over."""


def _forwards(timer: ActionTimer, number: int | None) -> dict[Action, float]:
    medians = {
        action: median(sample.ms for sample in timer.samples(Phase.STABLE, action, number))
        for action in timer.actions(Phase.STABLE)
        if action.kind is Kind.FORWARD
    }
    return {action: ms for action, ms in medians.items() if ms is not None}


def _points(timer: ActionTimer, phase: Phase, number: int | None) -> dict[Action, Points]:
    """One median for each action, or its newest samples where each has a freeze ratio of its own."""
    points: dict[Action, Points] = {}
    for action in timer.actions(phase):
        samples = timer.samples(phase, action, number)
        if action.kind is Kind.FORWARD or not samples:
            continue
        if phase is Phase.MONITORING_MIXED:
            points[action] = tuple((sample.share, sample.ms) for sample in samples[-_SINGLE_SAMPLES:])
        elif (ms := median(sample.ms for sample in samples)) is not None:
            points[action] = ((sum(sample.share for sample in samples) / len(samples), ms),)
    return points
