"""What keeps a batch from ending earlier: the rank on which a critical path can spend most of its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, PipelineSchedule

__all__ = ["Holder", "held_by"]

_TOLERANCE = 1e-9  # of the makespan: slack below it is rounding
_AT_ONCE = 32  # ranks; bounds the memory


@dataclass(frozen=True, slots=True)
class Holder:
    """The rank that holds a batch, its stages, and the share of the batch in [0, 1] that a critical path is on it."""

    rank: int
    stages: tuple[int, ...]
    share: float

    def __str__(self) -> str:
        if len(self.stages) == 1:
            return f"stage {self.stages[0]}"
        return f"rank {self.rank} (stages {', '.join(map(str, self.stages))})"


def held_by(schedule: PipelineSchedule, dag: PipelineDag, durations: Mapping[Action, float]) -> Holder:
    """Who holds the batch in which every action takes ``durations``, in ms.

    A batch usually has many critical paths, which wander between ranks that are equally busy. So each rank is asked
    for the critical path that is longest on it; the rank with the longest answer holds the batch.
    """
    home = {stage: rank for rank in range(len(schedule.ranks)) for stage in schedule.stages_of(rank)}
    rank_of = np.array([home[action.stage] for action in dag.actions], dtype=np.int64)
    length = dag.durations(durations)
    busy = np.bincount(rank_of, weights=length, minlength=len(schedule.ranks))
    busiest = np.argsort(-busy, kind="stable")
    rank, most = int(busiest[0]), 0.0
    for first in range(0, len(busiest), _AT_ONCE):
        asked = busiest[first : first + _AT_ONCE]
        if busy[asked[0]] <= most:
            break  # no path is on a rank for longer than the rank is busy
        on_rank = _longest_on(asked.tolist(), dag, length, rank_of)
        best = int(np.argmax(on_rank))
        if on_rank[best] > most:
            rank, most = int(asked[best]), float(on_rank[best])
    end = dag.end(length)
    return Holder(rank, schedule.stages_of(rank), most / end if end > 0.0 else 0.0)


def _longest_on(
    ranks: Sequence[int], dag: PipelineDag, length: NDArray[np.float64], rank_of: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Of all critical paths, the most ms that one is on each of ``ranks``."""
    starts = dag.earliest_starts(length)
    finish = starts + length
    end = float(finish.max(initial=0.0))
    slack = end * _TOLERANCE
    own = np.where(rank_of[:, None] == np.array(ranks)[None, :], length[:, None], 0.0)
    # Of the critical chains up to and with an action. Edges come by target in topological order, so what is known
    # of a source is final.
    before = np.zeros_like(own)
    for source, target, delay in zip(*(column.tolist() for column in dag.edges), strict=True):
        if finish[source] + delay >= starts[target] - slack:
            np.maximum(before[target], before[source] + own[source], out=before[target])
    longest: NDArray[np.float64] = (before + own)[finish >= end - slack].max(axis=0)
    return longest
