"""A pipeline schedule as a directed acyclic graph: the start time of each action, and the length of the batch.

The paper's appendix "Edge Construction Rules" lists source and destination, intra-stage, inter-stage and schedule
edges. A rank's order already implies the intra-stage edges, so only the chain of each rank's order and the inter-stage
edges are built. There is no source or destination node. Instead, an action without a predecessor starts at 0 or later,
and an action without a successor ends no later than the batch. With split backwards or idle ranks, the last action need
not be on the first stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.ir import Action, PipelineSchedule

Floats = NDArray[np.float64]


class Edges(NamedTuple):
    """Edge k goes from ``sources[k]`` to ``targets[k]`` (positions in ``PipelineDag.actions``), by target.

    ``delay[k]`` is the time in ms between the source's end and the target's earliest start.
    """

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    delay: Floats


_NO_EDGES = Edges(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))


@dataclass(frozen=True, eq=False)
class PipelineDag:
    """Actions in topological order, and their edges. Time and memory are linear in the number of actions.

    ``loops`` lead from one step to the next, if steps overlap (``PeriodicDag``).
    """

    actions: tuple[Action, ...]
    index: dict[Action, int]
    edges: Edges
    loops: Edges = _NO_EDGES

    @classmethod
    def from_schedule(
        cls,
        schedule: PipelineSchedule,
        communication: Mapping[tuple[Action, Action], float] | None = None,
        overhead: Mapping[Action, float] | None = None,
        waits: Mapping[tuple[Action, Action], float] | None = None,
    ) -> PipelineDag:
        """Build the DAG of ``schedule``. Times in ms are 0 where absent.

        ``communication`` has the time of edges between stages. ``overhead`` is the time that a rank spends before an
        action in addition to the wait for its input: receiving, launching. ``waits`` are further edges: the second
        action of a pair starts at least this time after the end of the first.

        Raises ScheduleError if the schedule cannot run, if ``communication`` names a pair that is not an edge between
        stages, or if ``waits`` names an unknown action.
        """
        schedule.validate()
        delays = dict.fromkeys(schedule.transfers(), 0.0)
        for (source, target), delay in (communication or {}).items():
            if (source, target) not in delays:
                raise ScheduleError(f"{source}->{target} is not an edge between stages of this schedule")
            delays[source, target] = float(delay)
        # A transfer between neighbours on one rank (V-shaped schedules) implies the order edge.
        for action, before in schedule.before.items():
            own = float((overhead or {}).get(action, 0.0))
            delays[before, action] = max(own, delays.get((before, action), 0.0))
        known = set(schedule.actions) if waits else set()
        for edge, delay in (waits or {}).items():
            if not known.issuperset(edge):
                raise ScheduleError(f"{edge[0]}->{edge[1]} is a wait between actions that this schedule does not have")
            delays[edge] = max(float(delay), delays.get(edge, 0.0))
        actions = schedule.execution_order(waits or ())
        index = {action: position for position, action in enumerate(actions)}
        rows = sorted((index[target], index[source], delay) for (source, target), delay in delays.items())
        targets, sources, lengths = zip(*rows, strict=True)
        return cls(actions, index, Edges(np.array(sources), np.array(targets), np.array(lengths)))

    def with_delays(self, change: Callable[[Floats], Floats]) -> PipelineDag:
        """Return the same graph with other delays of edges and loops."""
        edges, loops = (of._replace(delay=change(of.delay)) for of in (self.edges, self.loops))
        return replace(self, edges=edges, loops=loops)

    def durations(self, durations: Mapping[Action, float]) -> Floats:
        """The values of ``durations`` in the order of ``actions``."""
        return np.array([durations[action] for action in self.actions], dtype=np.float64)

    def earliest_starts(self, durations: Floats) -> Floats:
        """Earliest start of each action in ms (the paper's P_i); durations and result follow ``actions``."""
        return self.starts_from(np.zeros(len(self.actions)), durations)

    def starts_from(self, ready: Floats, durations: Floats) -> Floats:
        """Earliest start of each action in ms, if none starts before its ``ready``; all follow ``actions``."""
        starts, length = ready.tolist(), durations.tolist()
        for source, target, delay in zip(*(column.tolist() for column in self.edges), strict=True):
            starts[target] = max(starts[target], starts[source] + length[source] + delay)
        return np.array(starts, dtype=np.float64)

    def start_times(self, durations: Mapping[Action, float]) -> dict[Action, float]:
        """Earliest start of each action in ms; the batch starts at 0."""
        return dict(zip(self.actions, self.earliest_starts(self.durations(durations)).tolist(), strict=True))

    def makespan(self, durations: Mapping[Action, float]) -> float:
        """Time in ms from a batch's start to the end of its last action, if all ranks begin it together."""
        return self.batch_end(self.durations(durations))

    def span_ms(self, durations: Mapping[Action, float]) -> float:
        """The pipeline's part of a step in ms: the makespan, or the period if steps overlap (``PeriodicDag``)."""
        return self.span(self.durations(durations))

    def span(self, durations: Floats) -> float:
        """``span_ms`` of durations in the order of ``actions``."""
        return self.batch_end(durations)

    def batch_end(self, durations: Floats) -> float:
        """``makespan`` of durations in the order of ``actions``."""
        starts = self.starts_from(np.zeros(len(self.actions)), durations)
        with np.errstate(over="ignore"):  # the caller handles infinity
            return float(np.max(starts + durations, initial=0.0))

    def critical_path(self, durations: Mapping[Action, float]) -> tuple[Action, ...]:
        """One chain of actions, first to last, whose durations and delays add up to the makespan."""
        length = self.durations(durations)
        finish = self.earliest_starts(length) + length
        latest = self._latest_arrivals(finish, {})
        position = int(np.argmax(finish))
        path = [self.actions[position]]
        while position in latest:
            position = latest[position][1]
            path.append(self.actions[position])
        return tuple(reversed(path))

    def _latest_arrivals(self, finish: Floats, latest: dict[int, tuple[float, int]]) -> dict[int, tuple[float, int]]:
        """Add the latest arrival over an edge, and its source, to ``latest`` for each target where it is later."""
        for source, target, delay in zip(*(column.tolist() for column in self.edges), strict=True):
            arrival = float(finish[source]) + delay
            if target not in latest or arrival > latest[target][0]:
                latest[target] = (arrival, source)
        return latest
