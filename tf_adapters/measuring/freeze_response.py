"""The time of a stage's backwards under freezing: a line in the frozen share, fitted to samples.

The cost of a weight gradient does not depend on other frozen parameters. The time that freezing saves is therefore
proportional to the frozen share of the stage's work (paper section 3.2.1). One slope (``theil_sen``) serves all
microbatches of a stage, because they run the same kernels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tf_adapters.measuring.estimates import Estimate, estimate, grouped, shrink
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.theil_sen import Point, fit
from tf_adapters.measuring.timer import ActionTimer
from tf_adapters.measuring.token_cost import TokenCost, measured_token_cost
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind

_T = TypeVar("_T")
Group = tuple[int, Kind]
"""A stage's actions of one kind, which do the same work."""

_FREEZING = (Phase.MONITORING_LOWER, Phase.MONITORING_MIXED)
_SAME_WORK = 1.25
"""Up to this ratio of longest to shortest, a stage's backwards count as equal work: only caches differ."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """This rank's measurements in monitoring: ms of each action with nothing frozen, and the responses.

    A response is the saving of full freezing, as a share of the unfrozen time; its error includes that of this time.
    ``token_costs`` are by stage, if tokens are sampled.
    """

    unfrozen_ms: Mapping[Action, float]
    responses: Mapping[Group, Estimate]
    token_costs: Mapping[int, TokenCost] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """The largest error of the responses."""
        return max((response.error for response in self.responses.values()), default=0.0)

    def bounds(self) -> dict[Action, Bounds]:
        """Bounds in ms. Forwards do not change with freezing (paper section 3.2.1), so their two bounds are equal.

        If a stage's backwards take about equal times, freezing saves the same time in each: they skip the same weight
        gradients. If savings differed by noise, the linear program would fully freeze the same microbatches in every
        step, and training would never learn from their samples.
        """
        bounds = {action: Bounds(ms, ms) for action, ms in self.unfrozen_ms.items()}
        groups = _by_group(self.unfrozen_ms)
        for group, response in self.responses.items():
            upper = groups[group]
            alike = max(upper.values()) <= _SAME_WORK * min(upper.values())
            mean = statistics.fmean(upper.values())
            for action, ms in upper.items():
                bounds[action] = Bounds(max(0.0, ms - response.value * (mean if alike else ms)), ms)
        return bounds

    def means(self) -> dict[Group, Bounds]:
        """Mean bounds of each stage's actions of one kind, in ms."""
        return {group: mean_bounds(of_group.values()) for group, of_group in _by_group(self.bounds()).items()}

    def typical_ms(self) -> dict[Group, float]:
        """Median ms of each stage's actions of one kind, unfrozen. A single action that waits does not change it."""
        return {group: statistics.median(of.values()) for group, of in _by_group(self.unfrozen_ms).items()}


def mean_bounds(bounds: Collection[Bounds]) -> Bounds:
    """The mean of each of the two bounds, in ms."""
    return Bounds(statistics.fmean(b.lower for b in bounds), statistics.fmean(b.upper for b in bounds))


def measured_times(
    timer: ActionTimer, first_stage: int | None, sampled: bool = False, microbatches: int | None = None
) -> StageTimes:
    """Fit the lines to this rank's measurements in monitoring so far.

    ``first_stage`` is the first stage that trains any parameter: its backward disappears when all of it is frozen.
    Only the first ``microbatches`` of a batch are used, in all steps that have them; by default all.
    """
    unfrozen = _unfrozen_ms(timer, math.inf if microbatches is None else microbatches)
    upper = {action: ms for group in unfrozen.values() for action, ms in group.items()}
    responses = {
        group: response
        for group, of_group in unfrozen.items()
        if group[1].freezable and (response := _fit(timer, of_group, group[0] == first_stage)) is not None
    }
    costs = {
        stage: cost
        for (stage, kind), of_group in unfrozen.items()
        if kind.freezable and (cost := measured_token_cost(timer, of_group)) is not None
    }
    return StageTimes(upper, responses, costs if sampled else {})


def _unfrozen_ms(timer: ActionTimer, microbatches: float) -> dict[Group, dict[Action, float]]:
    """Return unfrozen times. Microbatches of a stage do the same work, so differences are shrunk by their noise."""
    estimates = {
        action: of_action
        for action in timer.actions(Phase.MONITORING_UPPER)
        if action.microbatch < microbatches
        and (of_action := estimate(sample.ms for sample in timer.samples(Phase.MONITORING_UPPER, action))) is not None
    }
    return {group: shrink(of_group) for group, of_group in _by_group(estimates).items()}


def _by_group(of: Mapping[Action, _T]) -> dict[Group, dict[Action, _T]]:
    groups: dict[Group, dict[Action, _T]] = {}
    for action, value in of.items():
        groups.setdefault((action.stage, action.kind), {})[action] = value
    return groups


def _fit(timer: ActionTimer, upper: Mapping[Action, float], vanishes: bool) -> Estimate | None:
    """Fit the response of one group, given its unfrozen times; None without samples.

    If backwards compute their deferrable weight gradients at the end, the time of that part gives the response with
    nothing frozen: this part is what a plan can move or freeze.
    """
    last = (1.0 - part for action in upper for part in timer.first_parts(Phase.MONITORING_UPPER, action))
    line = estimate(last) or fit(_points(timer, upper, vanishes))
    if line is None:
        return None
    return replace(line, error=math.hypot(_unfrozen_error(timer, upper), line.error))


def _points(timer: ActionTimer, upper: Mapping[Action, float], vanishes: bool) -> list[list[Point]]:
    """Group samples by step. If a fully frozen backward ``vanishes``, its samples do not belong to the line."""
    sampled = {a: [sample for phase in _FREEZING for sample in timer.samples(phase, a)] for a in upper}
    partial = any(0.0 < sample.share < 1.0 for samples in sampled.values() for sample in samples)
    limit = 1.0 if vanishes and partial else math.inf
    steps = grouped(
        (sample.step, Point(sample.share, sample.ms / upper[action]))
        for action, samples in sampled.items()
        if upper[action] > 0.0
        for sample in samples
        if sample.share < limit
    )
    return list(steps.values())


def _unfrozen_error(timer: ActionTimer, upper: Mapping[Action, float]) -> float:
    """Return the relative standard error of a group's unfrozen time, from the spread over steps and over samples."""
    steps = grouped(
        (sample.step, sample.ms / ms)
        for action, ms in upper.items()
        if ms > 0.0
        for sample in timer.samples(Phase.MONITORING_UPPER, action)
    )
    by_step = estimate(statistics.median(of_step) for of_step in steps.values())
    off = estimate(ratio for of_step in steps.values() for ratio in of_step)
    return max(by_step.error, off.error) if by_step and off else math.inf
