"""From samples to the planner's bounds: per rank, then merged over data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tf_adapters.errors import TimelyFreezeError
from tf_adapters.ir import Action, Kind, PipelineSchedule
from tf_adapters.phases import Phase
from tf_adapters.planner import Bounds
from tf_adapters.robust import Estimate, estimate, median, shrink
from tf_adapters.timing import ActionTimer, Sample, durations_all_frozen


class MeasurementError(TimelyFreezeError, RuntimeError):
    """An action of the schedule was never measured."""


def local_bounds(timer: ActionTimer) -> dict[Action, Bounds]:
    """Bounds, ms, of the actions that this rank ran during monitoring.

    Forwards do not change with freezing (paper section 3.2.1), so both of their bounds are the unfrozen one.
    """
    unfrozen = {
        action: estimate(sample.ms for sample in timer.samples(Phase.MONITORING_UPPER, action))
        for action in timer.actions(Phase.MONITORING_UPPER)
    }
    upper = _alike(unfrozen)
    drift = {stage: _drift(timer, stage) for stage in {action.stage for action in upper}}
    frozen = {
        action: estimate(durations_all_frozen(ms, _at_first_halfs_speed(timer, action, drift[action.stage])))
        for action, ms in upper.items()
        if action.freezable
    }
    lower = _alike(frozen)
    return {action: Bounds(lower.get(action, ms), ms) for action, ms in upper.items()}


def _drift(timer: ActionTimer, stage: int) -> float:
    """How much slower the machine was in the second half of monitoring than in the first.

    Forwards do the same work in both halves. Without them a change of clock rate or of the neighbours' load between
    the halves would be taken for an effect of freezing.
    """
    ratios = []
    for action in timer.actions(Phase.MONITORING_LOWER):
        if action.stage == stage and action.kind is Kind.FORWARD:
            first = median(sample.ms for sample in timer.samples(Phase.MONITORING_UPPER, action))
            second = median(sample.ms for sample in timer.samples(Phase.MONITORING_LOWER, action))
            if first and second:
                ratios.append(second / first)
    return median(ratios) or 1.0


def _at_first_halfs_speed(timer: ActionTimer, action: Action, drift: float) -> list[Sample]:
    samples = timer.samples(Phase.MONITORING_LOWER, action)
    return [Sample(sample.share, sample.ms / drift) for sample in samples]


def _alike(estimates: Mapping[Action, Estimate | None]) -> dict[Action, float]:
    """The microbatches of a stage do the same work: their differences count as far as noise does not explain them."""
    groups: dict[tuple[int, Kind], dict[Action, Estimate]] = {}
    for action, found in estimates.items():
        if found is not None:
            groups.setdefault((action.stage, action.kind), {})[action] = found
    return {action: ms for group in groups.values() for action, ms in shrink(group).items()}


def merge_bounds(
    schedule: PipelineSchedule, per_rank: Iterable[Mapping[Action, Bounds]]
) -> tuple[dict[Action, Bounds], tuple[str, ...]]:
    """One bound for each action, and a sentence for each that noise had crossed and that was clamped.

    A stage takes as long as its slowest replica. Raises MeasurementError for an action that nobody measured.
    """
    replicas = list(per_rank)
    merged: dict[Action, Bounds] = {}
    notes = []
    for action in schedule.actions:
        measured = [bounds[action] for bounds in replicas if action in bounds]
        if not measured:
            raise MeasurementError(f"{action} was never measured during monitoring")
        upper = max(bounds.upper for bounds in measured)
        lower = max(bounds.lower for bounds in measured)
        if lower > upper:
            notes.append(f"{action}: measured {lower:.3f} ms frozen, {upper:.3f} ms unfrozen; taken as not freezable")
        merged[action] = Bounds(min(max(lower, 0.0), upper), upper)
    return merged, tuple(notes)
