"""The planner's bounds: what the ranks have measured, merged over data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tf_adapters.errors import TimelyFreezeError
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule


class MeasurementError(TimelyFreezeError, RuntimeError):
    """An action of the schedule was never measured."""


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
