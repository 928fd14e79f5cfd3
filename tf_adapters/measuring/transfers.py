"""The time between actions: transfers between stages, and a rank's overhead before an action.

Both are computed from the traces of monitored steps. Every rank has its own clock and its own start of a step. Messages
in both directions between two ranks bound the difference of their clocks from both sides, as in the Network Time
Protocol (RFC 5905, section 8). The shortest times of the two directions are assumed to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tf_adapters.measuring.estimates import grouped, median
from tf_adapters.measuring.timer import ActionTimer, Interval, Trace
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule, SendWait

_MOST_INTERVALS = 4_096
"""Most intervals that a rank sends: 32 KB. A single step may have more."""


class Gaps(NamedTuple):
    """Times between actions, in ms.

    ``communication`` is the time on edges between stages, from the end of the source to the end of the receive.
    ``overhead`` is the time between an action and the previous one of its rank if the action does not wait. ``waits``
    is the time between the end of an action and an action of another rank that waits for its receive (``SendWait``).
    """

    communication: Mapping[tuple[Action, Action], float] = MappingProxyType({})
    overhead: Mapping[Action, float] = MappingProxyType({})
    waits: Mapping[tuple[Action, Action], float] = MappingProxyType({})

    def renamed(self, rename: Callable[[Action], Action], actions: Container[Action]) -> Gaps:
        """Rename the actions for another order, and drop those that are not among its ``actions``."""

        def renamed_edges(of: Mapping[tuple[Action, Action], float]) -> dict[tuple[Action, Action], float]:
            edges = {(rename(source), rename(target)): ms for (source, target), ms in of.items()}
            return {(s, t): ms for (s, t), ms in edges.items() if s in actions and t in actions}

        overhead = {rename(action): ms for action, ms in self.overhead.items() if rename(action) in actions}
        return Gaps(renamed_edges(self.communication), overhead, renamed_edges(self.waits))


NO_GAPS = Gaps()


def local_traces(timer: ActionTimer, phase: str, microbatches: int) -> tuple[tuple[int, Trace], ...]:
    """Return the newest steps of this rank with their numbers, few enough to send."""
    traces = timer.traces(phase, microbatches)
    longest = max((len(trace) for _, trace in traces), default=0)
    return traces[-max(1, _MOST_INTERVALS // longest) :] if longest else ()


def complete_steps(schedule: PipelineSchedule, ranks: Sequence[Sequence[tuple[int, Trace]]]) -> dict[int, Trace]:
    """Return the steps that every rank of the pipeline has traced, by number, in order.

    ``ranks`` has each rank's newest steps with their numbers. A step has all ranks' intervals, on unaligned clocks.
    """
    steps: dict[int, dict[Action, Interval]] = {}
    for traces in ranks:
        for number, trace in traces:
            steps.setdefault(number, {}).update(trace)
    actions = set(schedule.actions)
    return {number: step for number, step in sorted(steps.items()) if step.keys() == actions}


def measure_gaps(schedule: PipelineSchedule, steps: Sequence[Trace]) -> Gaps:
    """Measure the gaps of a schedule from complete steps. Without steps there are no gaps.

    All microbatches of a stage send the same sizes, so one median serves all of them, separately for forwards and
    backwards.
    """
    before, source = schedule.before, schedule.source
    of_steps = [aligned(schedule, step) for step in steps]
    waits = [wait for wait in schedule.send_waits if _holds(wait, [on_one_clock for on_one_clock, _ in of_steps])]
    posted = grouped((wait.blocked, wait.posted) for wait in waits)
    lags: dict[tuple[int, Kind], list[_Lag]] = {}
    for on_one_clock, began in of_steps:
        for action, interval in on_one_clock.items():
            free = on_one_clock[before[action]].end_ms if action in before else began[schedule.home[action.stage]]
            needed = posted.get(action, []) + ([source[action]] if action in source else [])
            ready = max((on_one_clock[other].end_ms for other in needed), default=-math.inf)
            if action in before or ready > free:  # otherwise it waited for its rank to begin the step
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
    """Return whether the steps, on one clock, show the wait. Small messages are buffered and do not wait."""
    late = median(step[wait.blocked].start_ms - step[wait.posted].end_ms for step in steps)
    return late is not None and late >= 0.0


class _Lag(NamedTuple):
    """The time in ms before an action began, after its rank was free and its input was ready.

    ``waited`` is the time that the rank was free before the input was ready. It is negative if the input was first.
    """

    ms: float
    waited: float


def _transfer(lags: Sequence[_Lag]) -> float:
    """Return the transfer time: the lag of actions that waited for their input, or else the lag, a bound."""
    waited = median(lag.ms for lag in lags if lag.waited > 0.0)
    return (median(lag.ms for lag in lags) or 0.0) if waited is None else waited


def _overhead(lags: Sequence[_Lag], transfer: float) -> float:
    """Return the rank's overhead: the lag of actions whose input came first. Otherwise the shortest lag bounds it."""
    own = median(lag.ms for lag in lags if -lag.waited >= transfer)
    return min(lag.ms for lag in lags) if own is None else own


def aligned(schedule: PipelineSchedule, step: Trace) -> tuple[dict[Action, Interval], dict[int, float]]:
    """Return the step on the clock of one rank, and the time in ms at which each rank began it."""
    ahead = _clocks(schedule, step)
    on_one_clock = {}
    for action, interval in step.items():
        own = ahead[schedule.home[action.stage]]
        on_one_clock[action] = Interval(interval.start_ms - own, interval.end_ms - own)
    return on_one_clock, {rank: -of_rank for rank, of_rank in ahead.items()}


def _clocks(schedule: PipelineSchedule, step: Trace) -> dict[int, float]:
    """Return how far each rank's clock is ahead of rank 0's, in ms."""
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
