"""Find out whether all ranks meet between two steps, and how long each rank takes between its steps.

The rank that ends a batch first has most to gain. If it begins the next step before the last action of the batch has
ended, it did not wait for that action's rank, so steps overlap. Otherwise the ranks may meet: a reduction of the loss,
a norm over all gradients or a barrier holds that rank, or a weight that it shares with the rank that ends last.

But a rank that meets nobody may begin late, too. Its last message can hold it until the last action of the batch
begins, and then it does its own work between steps:

    rank 0   ...  B2 |   B3   | own work |
    rank 1   ...  B3 |  held  | own work |

If this work takes longer than that last action, the steps do not show whether ranks meet.
"""

from __future__ import annotations

from collections import Counter
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
    If it is not clear which, ``steps`` is "meet", and the own times are estimates for steps that overlap.
    """

    steps: Steps
    between_steps: dict[int, float]
    is_clear: bool = True


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
    if not steps or len(busy) < 2 or not until_next.keys() >= set(busy):
        return BetweenSteps("meet", {})
    seen = Counter(_seen(schedule, step) for step in steps)
    own = {rank: _own_time(schedule, rank, steps) for rank in busy}
    if 2 * seen["overlap"] >= len(steps):
        return BetweenSteps("overlap", own)
    if 2 * seen["meet"] >= len(steps):
        return BetweenSteps("meet", {})
    # A rank that was held seems to work longer. The shortest time is that of a rank that nothing held.
    return BetweenSteps("meet", dict.fromkeys(busy, min(own.values())), is_clear=False)


def _seen(schedule: PipelineSchedule, step: _Step) -> Steps | None:
    """Return what a step shows; None if ranks that meet and ranks that do not could both have run it."""
    on_one_clock, began = aligned(schedule, step.trace)
    ends = {rank: on_one_clock[row[-1]].end_ms for rank, row in enumerate(schedule.ranks) if row}
    begins = {rank: began[rank] + step.until_next[rank] for rank in ends}
    first, last = min(ends, key=lambda rank: ends[rank]), max(ends, key=lambda rank: ends[rank])
    margin = _EARLY * (ends[last] - ends[first])
    if begins[first] < ends[last] - margin:
        return "overlap"
    last_action = on_one_clock[schedule.ranks[last][-1]]
    own_ms = begins[last] - ends[last]
    return "meet" if last_action.start_ms + own_ms < ends[last] - margin else None


def _own_time(schedule: PipelineSchedule, rank: int, steps: Sequence[_Step]) -> float:
    """Return a rank's own time between two steps in ms, which begins at the end of its last action.

    If the rank's first action needs no input, the time ends at the start of that action in the next step. Otherwise it
    ends at the beginning of the next step, because the wait for the input hides all that the rank does after that.
    """
    first, last = schedule.ranks[rank][0], schedule.ranks[rank][-1]
    begun = median(step.until_next[rank] - step.trace[last].end_ms for step in steps) or 0.0
    prepared = 0.0 if first in schedule.source else median(step.trace[first].start_ms for step in steps) or 0.0
    return max(0.0, begun + prepared)
