"""Split the ranks' time in a batch into computing, waiting, transfer and overhead, from traces of monitored steps.

The time between an action and the previous action of its rank has three parts. *Waiting*: the input was not yet
computed. *Transfer*: the input was being sent. *Overhead*: the input had arrived and the rank was free. A receive that
is posted late counts as overhead, and so does a send that waits for its receiver.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median_low
from typing import Annotated, NamedTuple

from pydantic import Field

from tf_adapters.measuring.estimates import grouped, merged
from tf_adapters.measuring.freeze_response import Group
from tf_adapters.measuring.timer import Trace
from tf_adapters.measuring.transfers import NO_GAPS, Gaps, aligned
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.durations import Count, Milliseconds, Quotient
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.values import Value

_MOST_INTERVALS = 32_768
"""Most actions of all steps together, so that one rank analyses them in half a second. A single step may have more."""

_SLOWER = 0.03
"""A straggler is slower than the median by at least this share; less is below the measurement error."""

_MOST_STRAGGLERS = 8

_Kind = Annotated[str, Field(pattern="^[FBIW]$")]


@dataclass(frozen=True, slots=True)
class RankTimes:
    """A pipeline rank's batch in ms: computing by kind of action ("F", "B", "I", "W"), and the other parts."""

    compute_ms: Mapping[_Kind, Milliseconds]
    transfer_ms: Milliseconds
    overhead_ms: Milliseconds
    waiting_ms: Milliseconds

    @property
    def busy_ms(self) -> float:
        return sum(self.compute_ms.values())


@dataclass(frozen=True, slots=True)
class EdgeTimes:
    """Time in ms that a rank spends in a batch on messages from stage ``source`` to stage ``target``.

    ``kind`` is the kind of the receiving actions. ``late_ms`` is the time before actions whose input had arrived.
    """

    source: Count
    target: Count
    kind: _Kind
    waiting_ms: Milliseconds
    transfer_ms: Milliseconds
    late_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class CriticalPart:
    """Time in ms that a stage's actions of one kind are on the critical path of a batch."""

    stage: Count
    kind: _Kind
    ms: Milliseconds


@dataclass(frozen=True, slots=True)
class Straggler:
    """A stage with one replica that is slower than the others.

    Times are per microbatch in ms. ``cost_ms`` is what the batch would save if the replica were like the median.
    """

    stage: Count
    rank: Count
    slowest_ms: Milliseconds
    median_ms: Milliseconds
    cost_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class BatchTimes(Value):
    """A batch with nothing frozen, as a mean over ``steps`` monitored steps, in ms.

    A rank's times add up to ``span_ms``, and so does the critical path. ``replicas`` is the number of ranks that
    compute the same stage. ``replica_spread`` is (slowest - median) / median, the largest over the stages.
    """

    steps: Annotated[int, Field(ge=1)]
    span_ms: Milliseconds
    ranks: tuple[RankTimes, ...]
    edges: tuple[EdgeTimes, ...] = ()
    critical_path: tuple[CriticalPart, ...] = ()
    critical_transfer_ms: Milliseconds = 0.0
    critical_overhead_ms: Milliseconds = 0.0
    replicas: Annotated[int, Field(ge=1)] = 1
    replica_spread: Quotient = 0.0
    stragglers: tuple[Straggler, ...] = ()

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Share of the batch, in [0, 1], in which each rank does not compute."""
        if self.span_ms <= 0.0:
            return (0.0,) * len(self.ranks)
        return tuple(max(0.0, 1.0 - rank.busy_ms / self.span_ms) for rank in self.ranks)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in the batch, in [0, 1], in which they do not compute."""
        return fmean(self.bubbles) if self.ranks else 0.0


def batch_times(schedule: PipelineSchedule, steps: Sequence[Trace], gaps: Gaps = NO_GAPS) -> BatchTimes | None:
    """Return the mean over complete steps (``transfers.complete_steps``) with nothing frozen; None without steps.

    Only the middle half of the steps, by length of the batch, counts. The parts of their mean add up, and a disturbed
    step does not change it. ``gaps``, from the same steps, has the duration of transfers.
    """
    newest = steps[-max(1, _MOST_INTERVALS // max(1, len(schedule.actions))) :]
    batches = sorted((_Batch(schedule, aligned(schedule, step)[0], gaps) for step in newest), key=lambda b: b.span_ms)
    kept = batches[len(batches) // 4 : len(batches) - len(batches) // 4]
    if not kept:
        return None
    paths, transfers, overheads = zip(*(batch.critical_path() for batch in kept), strict=True)
    parts = sorted(merged(paths, operator.add).items())
    return BatchTimes(
        steps=len(kept),
        span_ms=fmean(batch.span_ms for batch in kept),
        ranks=tuple(_mean_rank([batch.ranks[row] for batch in kept]) for row in range(len(schedule.ranks))),
        edges=_mean_edges(schedule, kept),
        critical_path=tuple(CriticalPart(stage, kind.value, ms / len(kept)) for (stage, kind), ms in parts),
        critical_transfer_ms=max(0.0, fmean(transfers)),
        critical_overhead_ms=max(0.0, fmean(overheads)),
    )


class _Before(NamedTuple):
    """Time between an action and the previous action of its rank, ms."""

    waiting: float
    transfer: float
    overhead: float


class _Batch:
    """One step on one clock."""

    def __init__(self, schedule: PipelineSchedule, step: Trace, gaps: Gaps) -> None:
        self._step, self._delay = step, gaps.communication
        self._before, self._source = schedule.before, schedule.source
        self._start = min(interval.start_ms for interval in step.values())
        self._end = max(interval.end_ms for interval in step.values())
        self.span_ms = self._end - self._start
        self.passed = {action: self._passed(action) for action in step}
        self.ranks = [self._rank(actions) for actions in schedule.ranks]

    def _free(self, action: Action) -> float:
        before = self._before.get(action)
        return self._start if before is None else self._step[before].end_ms

    def _ready(self, action: Action) -> tuple[float, float]:
        """When the action's input was computed, and when it could arrive; minus infinity without input."""
        source = self._source.get(action)
        ready = -math.inf if source is None else self._step[source].end_ms
        return ready, ready if source is None else ready + self._delay.get((source, action), 0.0)

    def _passed(self, action: Action) -> _Before:
        free, (ready, there) = self._free(action), self._ready(action)
        passed = max(0.0, self._step[action].start_ms - free)
        waiting = min(passed, max(0.0, ready - free))
        if waiting > 0.0:
            return _Before(waiting, passed - waiting, 0.0)
        on_its_way = min(passed, max(0.0, there - free))
        return _Before(0.0, on_its_way, passed - on_its_way)

    def _rank(self, actions: Sequence[Action]) -> RankTimes:
        compute: defaultdict[str, float] = defaultdict(float)
        for action in actions:
            compute[action.kind.value] += self._step[action].end_ms - self._step[action].start_ms
        transfer = sum(self.passed[action].transfer for action in actions)
        overhead = sum(self.passed[action].overhead for action in actions)
        # The rest is waiting: before its first action, between its actions and after its last.
        return RankTimes(dict(compute), transfer, overhead, self.span_ms - sum(compute.values()) - transfer - overhead)

    def critical_path(self) -> tuple[dict[Group, float], float, float]:
        """Return the time on the critical path by actions' group, in transfers and in overhead, ms.

        The path is followed backwards: from the last action to the action that it waited for, and so on.
        """
        compute: defaultdict[Group, float] = defaultdict(float)
        transfer = overhead = 0.0
        action: Action | None = max(self._step, key=lambda a: self._step[a].end_ms)
        while action is not None:
            interval = self._step[action]
            compute[action.stage, action.kind] += interval.end_ms - interval.start_ms
            free, (ready, there) = self._free(action), self._ready(action)
            if there > free:
                transfer += interval.start_ms - ready
                action = self._source[action]
            else:
                overhead += interval.start_ms - free
                action = self._before.get(action)
        return compute, transfer, overhead


def _mean_rank(times: Sequence[RankTimes]) -> RankTimes:
    kinds = sorted({kind for of_step in times for kind in of_step.compute_ms})
    return RankTimes(
        {kind: fmean(of_step.compute_ms.get(kind, 0.0) for of_step in times) for kind in kinds},
        fmean(of_step.transfer_ms for of_step in times),
        fmean(of_step.overhead_ms for of_step in times),
        max(0.0, fmean(of_step.waiting_ms for of_step in times)),
    )


def _mean_edges(schedule: PipelineSchedule, batches: Sequence[_Batch]) -> tuple[EdgeTimes, ...]:
    """Mean times of the edges between ranks, by receiving stage and kind."""
    groups = grouped(
        ((source.stage, target.stage, target.kind), target) for target, source in schedule.received.items()
    )
    edges = []
    for (source_stage, target_stage, kind), actions in sorted(groups.items()):
        passed = (batch.passed[action] for batch in batches for action in actions)
        waiting, transfer, late = (sum(parts) / len(batches) for parts in zip(*passed, strict=True))
        between = source_stage, target_stage, kind.value
        edges.append(EdgeTimes(*between, waiting_ms=waiting, transfer_ms=transfer, late_ms=late))
    return tuple(edges)


def with_replicas(
    batch: BatchTimes,
    dag: PipelineDag,
    upper: Mapping[Action, float],
    ranks: Iterable[tuple[int, Mapping[Group, float]]],
) -> BatchTimes:
    """Return the batch with a comparison of the ranks that compute the same stage.

    ``ranks`` has each rank's number and the typical ms of its actions by stage and kind. ``upper`` has the times of the
    slowest replica, for which the batch ``dag`` waits. With two replicas, the faster one counts as the median.
    """
    by_stage: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for rank, means in ranks:
        for (stage, _), ms in means.items():
            by_stage[stage][rank] = by_stage[stage].get(rank, 0.0) + ms
    found = []
    for stage, of_rank in by_stage.items():
        rank = max(of_rank, key=of_rank.__getitem__)
        found.append(Straggler(stage, rank, of_rank[rank], median_low(of_rank.values()), cost_ms=0.0))
    found.sort(key=lambda slow: slow.slowest_ms - slow.median_ms, reverse=True)
    worst = [slow for slow in found if _excess(slow) >= _SLOWER][:_MOST_STRAGGLERS]
    end = dag.span_ms(upper) if worst else 0.0

    def cost_ms(slow: Straggler) -> float:
        at_median = {action: ms / (1.0 + _excess(slow)) for action, ms in upper.items() if action.stage == slow.stage}
        return max(0.0, end - dag.span_ms({**upper, **at_median}))

    return replace(
        batch,
        replicas=max(map(len, by_stage.values()), default=1),
        replica_spread=max(map(_excess, found), default=0.0),
        stragglers=tuple(replace(slow, cost_ms=cost_ms(slow)) for slow in worst),
    )


def _excess(slow: Straggler) -> float:
    """Return (slowest - median) / median."""
    return (slow.slowest_ms - slow.median_ms) / slow.median_ms if slow.median_ms > 0.0 else 0.0
