"""The graph of a training step that is repeated, on ranks that do not meet between steps.

A rank that has finished its part of a step updates its weights and begins the next step, although other ranks still
work. The time of a step is then the *period*: from a rank's first action to its first action in the next step. It is
the smallest T for which start times satisfy the edges of one step and these *loops*.

    start of a rank's first action + T >= end of its last action + its time between steps.

All ranks have the same T, and the start times of the ranks are free to shift against each other. The smallest T is the
largest mean length of a cycle through the loops (Karp, "A characterization of the minimum cycle mean in a digraph",
Discrete Mathematics 23, 1978).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tf_adapters.schedule.dag import Edges, Floats, PipelineDag
from tf_adapters.schedule.ir import Action, PipelineSchedule


@dataclass(frozen=True, eq=False)
class PeriodicDag(PipelineDag):
    """A step's graph whose ``loops`` lead from each rank's last action to its first action of the next step."""

    @classmethod
    def of(cls, dag: PipelineDag, schedule: PipelineSchedule, between_steps: Mapping[int, float]) -> PeriodicDag:
        """Add the loops to ``dag``. ``between_steps`` has each rank's time between steps, ms; 0 where absent."""
        busy = [(rank, row) for rank, row in enumerate(schedule.ranks) if row]
        loops = Edges(
            sources=np.array([dag.index[row[-1]] for _, row in busy], dtype=np.int64),
            targets=np.array([dag.index[row[0]] for _, row in busy], dtype=np.int64),
            delay=np.array([float(between_steps.get(rank, 0.0)) for rank, _ in busy]),
        )
        return cls(dag.actions, dag.index, dag.edges, loops)

    def span(self, durations: Floats) -> float:
        """The period in ms."""
        return self._steady(durations)[0]

    def earliest_starts(self, durations: Floats) -> Floats:
        """The start of each action in ms, in a step that repeats; the earliest is 0."""
        starts = self.starts_from(self._ready(durations), durations)
        return starts - float(starts.min())

    def critical_path(self, durations: Mapping[Action, float]) -> tuple[Action, ...]:
        """A cycle of actions whose durations, delays and times between steps add up to the period, or a multiple."""
        length = self.durations(durations)
        ready = self._ready(length)
        again = zip(self.loops.targets.tolist(), self.loops.sources.tolist(), strict=True)
        latest = {target: (float(ready[target]), source) for target, source in again}
        latest = self._latest_arrivals(self.starts_from(ready, length) + length, latest)
        position, path, seen = int(self.loops.sources[0]), list[int](), dict[int, int]()
        while position not in seen:
            seen[position] = len(path)
            path.append(position)
            position = latest[position][1]
        return tuple(self.actions[place] for place in reversed(path[seen[position] :]))

    def _ready(self, durations: Floats) -> Floats:
        """When the rank of each first action is ready for it, in a step that repeats; minus infinity elsewhere."""
        ready = np.full(len(self.actions), -np.inf)
        ready[self.loops.targets] = self._steady(durations)[1]
        return ready

    def _steady(self, durations: Floats) -> tuple[float, Floats]:
        """The period, and when each rank is ready for its first action, in ms."""
        paths = self._longest_paths(durations)
        period = max(0.0, _largest_cycle_mean(paths))
        closed = paths - period
        for middle in range(len(closed)):  # Floyd and Warshall: the longest paths over any number of steps
            np.maximum(closed, closed[:, middle, None] + closed[None, middle, :], out=closed)
        critical = int(np.argmax(np.diagonal(closed)))
        return period, closed[critical] - closed[critical, critical]

    def _longest_paths(self, durations: Floats) -> Floats:
        """The longest path in ms from each rank's first action to the end of each rank's time between steps.

        Shape (ranks, ranks), with rows for the beginnings.
        """
        count = len(self.loops.sources)
        starts = np.full((len(self.actions), count), -np.inf)
        starts[self.loops.targets, np.arange(count)] = 0.0
        lengths = durations[self.edges.sources] + self.edges.delay
        pairs = zip(self.edges.sources.tolist(), self.edges.targets.tolist(), lengths.tolist(), strict=True)
        rows = list(starts)
        for source, target, length in pairs:
            np.maximum(rows[target], rows[source] + length, out=rows[target])
        ends = starts[self.loops.sources] + (durations[self.loops.sources] + self.loops.delay)[:, None]
        return np.ascontiguousarray(ends.T)


def _largest_cycle_mean(paths: Floats) -> float:
    """The largest mean weight of a cycle in the complete graph with these weights; minus infinity is no edge."""
    count = len(paths)
    lengths = [np.zeros(count)]
    for _ in range(count):
        lengths.append(np.max(lengths[-1][:, None] + paths, axis=0))
    with np.errstate(invalid="ignore"):
        means = [(lengths[count] - lengths[k]) / (count - k) for k in range(count)]
    return float(np.max(np.min(means, axis=0), initial=-np.inf))
