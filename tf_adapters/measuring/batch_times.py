"""Where the ranks' time in a batch goes, from the traces of monitored steps: computing, transfers, waiting.

Of each action, what passed on its rank since the action before it is one of three things. *Waiting*: its input was not
computed yet. *Transfer*: the input was on its way. *Overhead*: the input was there and the rank was free; a receive
that is posted late shows here, and a send that waits for its receiver.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median_low
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from tf_adapters.measuring.freeze_response import Group
from tf_adapters.measuring.timer import Trace
from tf_adapters.measuring.transfers import NO_GAPS, Gaps, aligned
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.durations import Count, Milliseconds, Quotient
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

__all__ = ["BatchTimes", "CriticalPart", "EdgeTimes", "RankTimes", "Straggler", "batch_times", "with_replicas"]

_MOST_INTERVALS = 32_768
"""Of all steps together, unless a single step has more: they are looked at on one rank, in half a second."""

_SLOWER = 0.03
"""A replica that is slower than the median by less is no straggler: times are known no better."""

_MOST_STRAGGLERS = 8

_Kind = Annotated[str, Field(pattern="^[FBIW]$")]


@dataclass(frozen=True, slots=True)
class RankTimes:
    """A pipeline rank's batch in ms: computing by kind of action ("F", "B", "I", "W"), and what it does not compute."""

    compute_ms: Mapping[_Kind, Milliseconds]
    transfer_ms: Milliseconds
    overhead_ms: Milliseconds
    waiting_ms: Milliseconds

    @property
    def busy_ms(self) -> float:
        return sum(self.compute_ms.values())


@dataclass(frozen=True, slots=True)
class EdgeTimes:
    """What a rank lets pass in a batch for what stage ``source`` sends stage ``target``, ms.

    ``kind`` is that of the actions that receive it; ``late_ms`` passed before those whose input was there already.
    """

    source: Count
    target: Count
    kind: _Kind
    waiting_ms: Milliseconds
    transfer_ms: Milliseconds
    late_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class CriticalPart:
    """How long a stage's actions of one kind are the critical path of a batch, ms."""

    stage: Count
    kind: _Kind
    ms: Milliseconds


@dataclass(frozen=True, slots=True)
class Straggler:
    """A stage of which one replica is slower than the others.

    Times of a microbatch in ms; ``cost_ms`` is how much later the batch ends than if that replica were like the median.
    """

    stage: Count
    rank: Count
    slowest_ms: Milliseconds
    median_ms: Milliseconds
    cost_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """A batch with nothing frozen, a mean over ``steps`` monitored steps, ms.

    A rank's times add up to ``span_ms``, and so does the critical path. ``replicas`` is the number of ranks that
    compute the same stage, ``replica_spread`` by how much the slowest of them is above their median at most, a share.
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
        """The share of the batch, in [0, 1], in which each rank computes nothing."""
        if self.span_ms <= 0.0:
            return (0.0,) * len(self.ranks)
        return tuple(max(0.0, 1.0 - rank.busy_ms / self.span_ms) for rank in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in the batch, in [0, 1], in which they compute nothing."""
        return fmean(self.bubbles) if self.ranks else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BatchTimes:
        """The inverse of ``to_json``. Raises pydantic's ValidationError, a ValueError."""
        return _reader().validate_python(data)


@functools.cache
def _reader() -> TypeAdapter[BatchTimes]:
    return TypeAdapter(BatchTimes)


def batch_times(schedule: PipelineSchedule, steps: Sequence[Trace], gaps: Gaps = NO_GAPS) -> BatchTimes | None:
    """The mean over complete steps (``transfers.complete_steps``), nothing frozen in them; None without any.

    Only the half of the steps whose batches are neither the longest nor the shortest counts: a mean of these adds up,
    and a disturbed step does not move it. ``gaps``, from the same steps, tell how long a transfer is on its way.
    """
    newest = steps[-max(1, _MOST_INTERVALS // max(1, len(schedule.actions))) :]
    batches = sorted((_Batch(schedule, aligned(schedule, step)[0], gaps) for step in newest), key=lambda b: b.span_ms)
    kept = batches[len(batches) // 4 : len(batches) - len(batches) // 4]
    if not kept:
        return None
    critical = [batch.critical_path() for batch in kept]
    parts: defaultdict[Group, float] = defaultdict(float)
    for path in critical:
        for group, ms in path.compute_ms.items():
            parts[group] += ms / len(kept)
    return BatchTimes(
        steps=len(kept),
        span_ms=fmean(batch.span_ms for batch in kept),
        ranks=tuple(_mean_rank([batch.ranks[row] for batch in kept]) for row in range(len(schedule.ranks))),
        edges=_mean_edges(schedule, kept),
        critical_path=tuple(CriticalPart(stage, kind.value, ms) for (stage, kind), ms in sorted(parts.items())),
        critical_transfer_ms=max(0.0, fmean(path.transfer_ms for path in critical)),
        critical_overhead_ms=max(0.0, fmean(path.overhead_ms for path in critical)),
    )


class _Before(NamedTuple):
    """What passed on an action's rank since the action before it, ms."""

    waiting: float
    transfer: float
    overhead: float


class _Path(NamedTuple):
    """A critical path by what it spends its time on, ms."""

    compute_ms: Mapping[Group, float]
    transfer_ms: float
    overhead_ms: float


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
        """When the action's rank was free."""
        before = self._before.get(action)
        return self._start if before is None else self._step[before].end_ms

    def _ready(self, action: Action) -> tuple[float, float]:
        """When the action's input was computed, and when it could be there; minus infinity where it needs none."""
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
        transfer, overhead = (sum(getattr(self.passed[a], name) for a in actions) for name in ("transfer", "overhead"))
        # What is left: other ranks compute before its first action, between its actions and after its last.
        return RankTimes(dict(compute), transfer, overhead, self.span_ms - sum(compute.values()) - transfer - overhead)

    def critical_path(self) -> _Path:
        """From the last action back to what it had to wait for, and so on."""
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
        return _Path(compute, transfer, overhead)


def _mean_rank(times: Sequence[RankTimes]) -> RankTimes:
    kinds = sorted({kind for of_step in times for kind in of_step.compute_ms})
    return RankTimes(
        {kind: fmean(of_step.compute_ms.get(kind, 0.0) for of_step in times) for kind in kinds},
        fmean(of_step.transfer_ms for of_step in times),
        fmean(of_step.overhead_ms for of_step in times),
        max(0.0, fmean(of_step.waiting_ms for of_step in times)),
    )


def _mean_edges(schedule: PipelineSchedule, batches: Sequence[_Batch]) -> tuple[EdgeTimes, ...]:
    """Of the edges between ranks, by the stage and the kind that receive."""
    groups: defaultdict[tuple[int, int, Kind], list[Action]] = defaultdict(list)
    for source, target in schedule.transfers():
        if schedule.leaves_rank(source, target):
            groups[source.stage, target.stage, target.kind].append(target)
    edges = []
    for (source_stage, target_stage, kind), actions in sorted(groups.items()):
        passed = [batch.passed[action] for batch in batches for action in actions]
        count = len(batches)
        edges.append(
            EdgeTimes(
                source_stage,
                target_stage,
                kind.value,
                waiting_ms=sum(of.waiting for of in passed) / count,
                transfer_ms=sum(of.transfer for of in passed) / count,
                late_ms=sum(of.overhead for of in passed) / count,
            )
        )
    return tuple(edges)


# --- replicas ------------------------------------------------------------------------------------------------


def with_replicas(
    batch: BatchTimes,
    dag: PipelineDag,
    upper: Mapping[Action, float],
    ranks: Iterable[tuple[int, Mapping[Group, float]]],
) -> BatchTimes:
    """The same with the ranks that compute the same stage compared.

    ``ranks`` has each rank's number and the typical ms of its actions by stage and kind; ``upper`` are the times of the
    slowest of them, which the batch ``dag`` waits for. Of two replicas the faster one is the median.
    """
    by_stage: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for rank, means in ranks:
        for (stage, _), ms in means.items():
            by_stage[stage][rank] = by_stage[stage].get(rank, 0.0) + ms
    found = []
    for stage, of_rank in by_stage.items():
        slowest, middle = max(of_rank, key=of_rank.__getitem__), median_low(of_rank.values())
        found.append(_Slowest(of_rank[slowest] - middle, middle, stage=stage, rank=slowest))
    worst = [each for each in sorted(found, reverse=True) if each.share >= _SLOWER][:_MOST_STRAGGLERS]
    end = dag.makespan(upper) if worst else 0.0

    def straggler(slow: _Slowest) -> Straggler:
        rest = {action: ms / (1.0 + slow.share) for action, ms in upper.items() if action.stage == slow.stage}
        return Straggler(
            slow.stage,
            slow.rank,
            slowest_ms=slow.median + slow.above,
            median_ms=slow.median,
            cost_ms=max(0.0, end - dag.makespan({**upper, **rest})),
        )

    return replace(
        batch,
        replicas=max(map(len, by_stage.values()), default=1),
        replica_spread=max((each.share for each in found), default=0.0),
        stragglers=tuple(map(straggler, worst)),
    )


class _Slowest(NamedTuple):
    """The slowest rank of a stage, how far it is above the median, and the median: ms of a microbatch."""

    above: float
    median: float
    stage: int
    rank: int

    @property
    def share(self) -> float:
        """How far it is above the median, as a share of it."""
        return self.above / self.median if self.median > 0.0 else 0.0
