"""Find out whether all ranks meet between two steps, and how long each rank takes between its steps.

The rank that ends a batch first has most to gain. If it begins the next step before the last action of the batch has
ended, it did not wait for that action's rank, so steps overlap. Otherwise the ranks meet: a reduction of the loss, a
norm over all gradients or a barrier holds that rank, or a weight that it shares with the rank that ends last. Steps
whose ranks all end at about the same time show nothing; they count as meeting, since there is little to gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tf_adapters.measuring.compact import PackedTraces
from tf_adapters.measuring.estimates import median
from tf_adapters.measuring.measurement import Steps
from tf_adapters.measuring.timer import Trace
from tf_adapters.measuring.transfers import aligned
from tf_adapters.schedule.ir import PipelineSchedule

_EARLY = 0.1
"""A rank counts as early only if it begins the next step before the batch's end by more than a margin.

The margin is this share of the time from the rank's last action to the batch's end. It is needed because the clocks of
ranks are aligned less precisely than they are read."""


class BetweenSteps(NamedTuple):
    """A measurement of the time between steps.

    ``steps`` is "meet" or "overlap". If steps overlap, ``between_steps`` is each rank's own time between them, in ms.
    """

    steps: Steps
    between_steps: dict[int, float]


class _Step(NamedTuple):
    """A complete step on unaligned clocks, and by rank the time from its beginning to that of the next step, ms."""

    trace: Trace
    until_next: Mapping[int, float]


def between_steps(
    schedule: PipelineSchedule, traces: Mapping[int, Trace], ranks: Sequence[PackedTraces]
) -> BetweenSteps:
    """Return what at least half of the steps show.

    ``traces`` are the complete steps of ``ranks`` by number (``complete_steps``).
    """
    until_next = {rank.rank(schedule): rank.unpack_until_next() for rank in ranks if rank.steps}
    steps = [
        _Step(trace, {rank: of_rank[number] for rank, of_rank in until_next.items()})
        for number, trace in traces.items()
        if all(number in of_rank for of_rank in until_next.values())
    ]
    busy = [rank for rank, row in enumerate(schedule.ranks) if row]
    is_known = steps and until_next.keys() >= set(busy)
    if not is_known or 2 * sum(_begins_early(schedule, step) for step in steps) < len(steps):
        return BetweenSteps("meet", {})
    return BetweenSteps("overlap", {rank: _own_time(schedule, rank, steps) for rank in busy})


def _begins_early(schedule: PipelineSchedule, step: _Step) -> bool:
    """Return whether the rank that ended first begins the next step clearly before this batch has ended."""
    on_one_clock, began = aligned(schedule, step.trace)
    ends = {rank: on_one_clock[row[-1]].end_ms for rank, row in enumerate(schedule.ranks) if row}
    first, last = min(ends, key=lambda rank: ends[rank]), max(ends.values())
    return began[first] + step.until_next[first] < last - _EARLY * (last - ends[first])


def _own_time(schedule: PipelineSchedule, rank: int, steps: Sequence[_Step]) -> float:
    """Return a rank's own time between two steps in ms, which begins at the end of its last action.

    If the rank's first action needs no input, the time ends at the start of that action in the next step. Otherwise it
    ends at the beginning of the next step, because the wait for the input hides all that the rank does after that.
    """
    first, last = schedule.ranks[rank][0], schedule.ranks[rank][-1]
    begun = median(step.until_next[rank] - step.trace[last].end_ms for step in steps) or 0.0
    prepared = 0.0 if first in schedule.source else median(step.trace[first].start_ms for step in steps) or 0.0
    return max(0.0, begun + prepared)
