"""The time between actions: transfers between stages, and a rank's overhead before an action.

Both are computed from the traces of monitored steps. Every rank has its own clock and its own start of a step. Two
ranks that send each other something bound the difference of their clocks from both sides, as in the Network Time
Protocol (RFC 5905, section 8): the shortest way there and the shortest way back are taken to last equally long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tf_adapters.measuring.estimates import median
from tf_adapters.measuring.timer import ActionTimer, Interval, Trace
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule, SendWait

__all__ = ["NO_GAPS", "Gaps", "aligned", "complete_steps", "local_traces", "measure_gaps"]

_MOST_INTERVALS = 4_096
"""Of a rank: 32 KB of what it sends, unless a single step has more."""


class Gaps(NamedTuple):
    """Milliseconds. ``communication``: on edges between stages, from the source's end to the receive's.

    ``overhead``: before an action that waits for nobody, from the end of the one before it on its rank. ``waits``: from
    the end of an action to one of another rank that waits until what it sent is received (``SendWait``).
    """

    communication: Mapping[tuple[Action, Action], float] = MappingProxyType({})
    overhead: Mapping[Action, float] = MappingProxyType({})
    waits: Mapping[tuple[Action, Action], float] = MappingProxyType({})

    def to_json(self) -> dict[str, dict[str, float]]:
        """As the planner's INPUT object has them; ``waits`` only where there are any."""
        return {
            "communication": _edges_to_json(self.communication),
            "overhead": {str(action): ms for action, ms in self.overhead.items()},
            **({"waits": _edges_to_json(self.waits)} if self.waits else {}),
        }

    def renamed(self, rename: Callable[[Action], Action], actions: Container[Action]) -> Gaps:
        """The same for an order whose actions have other names; what is not among its ``actions`` is left out."""

        def renamed_edges(of: Mapping[tuple[Action, Action], float]) -> dict[tuple[Action, Action], float]:
            edges = {(rename(source), rename(target)): ms for (source, target), ms in of.items()}
            return {(s, t): ms for (s, t), ms in edges.items() if s in actions and t in actions}

        overhead = {rename(action): ms for action, ms in self.overhead.items() if rename(action) in actions}
        return Gaps(renamed_edges(self.communication), overhead, renamed_edges(self.waits))

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, float]]) -> Gaps:
        return cls(
            _edges_from_json(data["communication"]),
            {Action.parse(text): ms for text, ms in data["overhead"].items()},
            _edges_from_json(data.get("waits", {})),
        )


NO_GAPS = Gaps()


def _edges_to_json(edges: Mapping[tuple[Action, Action], float]) -> dict[str, float]:
    return {f"{source}->{target}": ms for (source, target), ms in edges.items()}


def _edges_from_json(data: Mapping[str, float]) -> dict[tuple[Action, Action], float]:
    pairs = {tuple(text.split("->")): ms for text, ms in data.items()}
    return {(Action.parse(source), Action.parse(target)): ms for (source, target), ms in pairs.items()}


def local_traces(timer: ActionTimer, phase: str, microbatches: int) -> tuple[tuple[int, Trace], ...]:
    """The newest steps of this rank with their numbers, few enough to be sent to others."""
    traces = timer.traces(phase, microbatches)
    longest = max((len(trace) for _, trace in traces), default=0)
    return traces[-max(1, _MOST_INTERVALS // longest) :] if longest else ()


def complete_steps(schedule: PipelineSchedule, ranks: Sequence[Sequence[tuple[int, Trace]]]) -> list[Trace]:
    """The steps that every rank of the pipeline has a trace of, all ranks' intervals together, unaligned.

    ``ranks`` has each rank's newest steps with their numbers.
    """
    steps: dict[int, dict[Action, Interval]] = {}
    for traces in ranks:
        for number, trace in traces:
            steps.setdefault(number, {}).update(trace)
    actions = set(schedule.actions)
    return [step for _, step in sorted(steps.items()) if step.keys() == actions]


def measure_gaps(schedule: PipelineSchedule, steps: Sequence[Trace]) -> Gaps:
    """Gaps of a schedule from complete steps; none without any.

    All microbatches of a stage send the same sizes, so one median serves them all, forwards and backwards apart.
    """
    before, source = schedule.before, schedule.source
    of_steps = [aligned(schedule, step) for step in steps]
    waits = [wait for wait in schedule.send_waits if _holds(wait, [on_one_clock for on_one_clock, _ in of_steps])]
    posted: dict[Action, list[Action]] = {}
    for wait in waits:
        posted.setdefault(wait.blocked, []).append(wait.posted)
    lags: dict[tuple[int, Kind], list[_Lag]] = {}
    for on_one_clock, began in of_steps:
        for action, interval in on_one_clock.items():
            free = on_one_clock[before[action]].end_ms if action in before else began[schedule.home[action.stage]]
            needed = posted.get(action, []) + ([source[action]] if action in source else [])
            ready = max((on_one_clock[other].end_ms for other in needed), default=-math.inf)
            if action in before or ready > free:  # else it waited for its rank to begin the step
                lag = _Lag(max(0.0, interval.start_ms - max(free, ready)), ready - free)
                lags.setdefault((action.stage, action.kind), []).append(lag)
    transfer = {group: _transfer(of_group) for group, of_group in lags.items()}
    own = {group: _overhead(of_group, transfer[group]) for group, of_group in lags.items()}
    return Gaps(
        {(source[a], a): transfer[a.stage, a.kind] for a in schedule.actions if a in source and lags},
        {a: own[a.stage, a.kind] for a in schedule.actions if a in before and lags},
        {(w.posted, w.blocked): transfer[w.sent[1].stage, w.sent[1].kind] for w in waits},
    )


def _holds(wait: SendWait, steps: Sequence[Mapping[Action, Interval]]) -> bool:
    """Whether steps on one clock show it: a small message may be on its way before its receiver takes it."""
    late = median(step[wait.blocked].start_ms - step[wait.posted].end_ms for step in steps)
    return late is not None and late >= 0.0


class _Lag(NamedTuple):
    """What passed before an action began, once its rank was free and its input ready: ms.

    ``waited`` is how long the rank was free before the input was ready, negative where the input was there first.
    """

    ms: float
    waited: float


def _transfer(lags: Sequence[_Lag]) -> float:
    """Where the rank waited for its input, the lag is the transfer. Where it never did, no transfer was longer."""
    waited = median(lag.ms for lag in lags if lag.waited > 0.0)
    return (median(lag.ms for lag in lags) or 0.0) if waited is None else waited


def _overhead(lags: Sequence[_Lag], transfer: float) -> float:
    """Where the input had come before the rank was free, the lag is the rank's own. Else the shortest bounds it."""
    own = median(lag.ms for lag in lags if -lag.waited >= transfer)
    return min(lag.ms for lag in lags) if own is None else own


def aligned(schedule: PipelineSchedule, step: Trace) -> tuple[dict[Action, Interval], dict[int, float]]:
    """The step on the clock of one rank, and when each rank began it there, ms."""
    ahead = _clocks(schedule, step)
    on_one_clock = {}
    for action, interval in step.items():
        own = ahead[schedule.home[action.stage]]
        on_one_clock[action] = Interval(interval.start_ms - own, interval.end_ms - own)
    return on_one_clock, {rank: -of_rank for rank, of_rank in ahead.items()}


def _clocks(schedule: PipelineSchedule, step: Trace) -> dict[int, float]:
    """How far each rank's clock is ahead of rank 0's, ms."""
    shortest: dict[tuple[int, int], float] = {}
    for source, target in schedule.transfers():
        way = schedule.home[source.stage], schedule.home[target.stage]
        lag = step[target].start_ms - step[source].end_ms
        shortest[way] = min(lag, shortest.get(way, lag))
    ahead = {0: 0.0}
    reached = [0]
    for rank in reached:
        for start, end in [way for way in shortest if way[0] == rank and way[1] not in ahead]:
            there, back = shortest[start, end], shortest.get((end, start))
            ahead[end] = ahead[start] + (there if back is None else (there - back) / 2)
            reached.append(end)
    return {rank: ahead.get(rank, 0.0) for rank in range(len(schedule.ranks))}
