"""Merge the bounds that ranks have measured over data-parallel replicas."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from tf_adapters.errors import TimelyFreezeError
from tf_adapters.measuring.estimates import grouped, merged
from tf_adapters.measuring.freeze_response import Group, mean_bounds
from tf_adapters.measuring.timer import Trace
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule

_K = TypeVar("_K", bound=Hashable)


def merge_bounds(
    schedule: PipelineSchedule,
    per_rank: Iterable[Mapping[Action, Bounds]],
    means: Iterable[Mapping[Group, Bounds]] = (),
) -> tuple[dict[Action, Bounds], tuple[str, ...]]:
    """Return the bounds of each action, and a sentence for each pair that noise had reversed and that was clamped.

    A stage takes as long as its slowest replica. ``per_rank`` has the bounds of each action, from the ranks of at least
    one replica. ``means`` has the mean bounds of each stage and kind on ranks that sent only these. Raises
    TimelyFreezeError for an action that no rank has measured.
    """
    slowest = _slowest(per_rank)
    for action in schedule.actions:
        if action not in slowest:
            raise TimelyFreezeError(f"{action} was never measured during monitoring")
    scale = _scales(slowest, _slowest(means))
    merged: dict[Action, Bounds] = {}
    notes = []
    for action in schedule.actions:
        of_lower, of_upper = scale.get((action.stage, action.kind), (1.0, 1.0))
        lower, upper = slowest[action].lower * of_lower, slowest[action].upper * of_upper
        if lower > upper:
            notes.append(f"{action}: measured {lower:.3f} ms frozen, {upper:.3f} ms unfrozen; taken as not freezable")
        merged[action] = Bounds(min(max(lower, 0.0), upper), upper)
    return merged, tuple(notes)


def slowest_durations(
    steps: Iterable[Trace], per_rank: Iterable[Mapping[Action, Bounds]], merged: Mapping[Action, Bounds]
) -> list[dict[Action, float]]:
    """Scale the traced replica's durations, in ms, to the slowest replica, for each step.

    ``merged`` is the result of ``merge_bounds`` for ``per_rank``. Each action is scaled as its bound is.
    """
    own = _slowest(per_rank)
    growth = {action: _growth(own[action].upper, bounds.upper) for action, bounds in merged.items()}
    return [{a: growth[a] * (span.end_ms - span.start_ms) for a, span in step.items()} for step in steps]


def _slowest(replicas: Iterable[Mapping[_K, Bounds]]) -> dict[_K, Bounds]:
    """Return the longest of all replicas for each of the two bounds."""
    return merged(replicas, lambda one, other: Bounds(max(one.lower, other.lower), max(one.upper, other.upper)))


def _scales(known: Mapping[Action, Bounds], means: Mapping[Group, Bounds]) -> dict[Group, tuple[float, float]]:
    """Return the factors of a group's lower and upper bounds that make their means those of the slowest replica."""
    groups = grouped(((action.stage, action.kind), bounds) for action, bounds in known.items())
    own = {group: mean_bounds(of_group) for group, of_group in groups.items() if group in means}
    return {
        group: (_growth(mean.lower, means[group].lower), _growth(mean.upper, means[group].upper))
        for group, mean in own.items()
    }


def _growth(own: float, other: float) -> float:
    return max(1.0, other / own) if own > 0.0 else 1.0
