"""Orders with deferred weight gradients: a host's B becomes an I in its place and a W where its rank would wait.

No other action of the batch needs a weight gradient. Deferring it therefore lets the batch end earlier with the same
gradients (zero-bubble pipelines: Qi et al. 2024). ``defer`` is list scheduling: in the order of time, each rank runs
its first action whose input has arrived, and a weight gradient if there is no such action. The number of microbatches
that a rank may hold limits how many weight gradients are deferred. It may also be lower than in the host's order, which
makes the batch longer (pipelines with controllable memory: Qi et al. 2024, arXiv 2405.15362).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.period import PeriodicDag

Edge = tuple[Action, Action]

_PATIENCE = (0.0, 0.5, 1.0)
"""A rank that waits for an input runs a weight gradient or a forward meanwhile, if the wait is at least this share of
that action's time. Each share is tried."""

_SHARES_MORE = (0.0, 0.5, 1.0)
"""Numbers of further microbatches to try if memory allows, as shares of what the host's fullest rank holds."""


@dataclass(frozen=True)
class DeferralTimes:
    """Milliseconds: ``durations`` of F, I and W, ``communication`` on edges between stages, ``overhead`` of actions.

    ``between_steps`` has each rank's time between steps where steps overlap; None where ranks meet.
    """

    durations: Mapping[Action, float]
    communication: Mapping[Edge, float]
    overhead: Mapping[Action, float]
    between_steps: Mapping[int, float] | None = None

    def evened(self) -> DeferralTimes:
        """Return times in which all actions of a kind take their mean, and nothing is communicated.

        With little memory an order made from these times is often better, also when it runs with the real ones. List
        scheduling then alternates regularly, and small differences do not change its order.
        """
        kinds = {kind: [ms for action, ms in self.durations.items() if action.kind is kind] for kind in Kind}
        means = {kind: fmean(values) for kind, values in kinds.items() if values}
        return DeferralTimes({action: means[action.kind] for action in self.durations}, {}, {})

    def span_ms(self, order: PipelineSchedule) -> float:
        """Return the makespan of an order, or its period where steps overlap."""
        dag = PipelineDag.from_schedule(order, self.communication, self.overhead)
        if self.between_steps is not None:
            dag = PeriodicDag.of(dag, order, self.between_steps)
        return dag.span_ms(self.durations)


def backward_of(half: Action) -> Action:
    """Return the B that an I or W is a half of; any other action itself."""
    return replace(half, kind=Kind.BACKWARD) if half.kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) else half


def first_half(action: Action) -> Action:
    """Return the I of a B, for which its neighbours wait; any other action itself."""
    return replace(action, kind=Kind.INPUT_GRAD) if action.kind is Kind.BACKWARD else action


def second_half(action: Action) -> Action:
    """Return the W of a B or I."""
    return replace(action, kind=Kind.WEIGHT_GRAD)


def split(schedule: PipelineSchedule) -> PipelineSchedule:
    """Replace every B by an I and its W right after it."""
    return PipelineSchedule(tuple(tuple(half for a in rank for half in _halves(a)) for rank in schedule.ranks))


def keeps_order(host: PipelineSchedule, rewritten: PipelineSchedule) -> bool:
    """Return whether only weight gradients have moved: forwards and backwards are in the host's order."""

    def without_weights(schedule: PipelineSchedule) -> list[list[Action]]:
        return [[backward_of(a) for a in rank if a.kind is not Kind.WEIGHT_GRAD] for rank in schedule.ranks]

    return without_weights(host) == without_weights(rewritten)


def most_in_flight(schedule: PipelineSchedule) -> int:
    """Return the most microbatches that any rank holds at once, from their forward to their weight gradient."""
    return max(map(most_held, schedule.ranks))


def whole_microbatches_held(schedule: PipelineSchedule) -> float:
    """Return the most microbatches that any rank holds at once, counted in all layers of the rank.

    A microbatch that a rank holds in half of its stages counts one half.
    """
    return most_in_flight(schedule) * len(schedule.ranks) / max(1, schedule.num_stages)


def defer(
    schedule: PipelineSchedule,
    times: DeferralTimes,
    extra_microbatches: int = 0,
    moves_forwards: bool = True,
    *,
    moves_stages: bool = True,
    fitting: Mapping[int, int] | None = None,
) -> PipelineSchedule | None:
    """Return the best order found within the ranks' ``memory_limits``; None if none was found.

    It has the earliest end, or the shortest period where steps overlap. It is never worse than the order with each W
    right after its I, if that one is within the limits.

    With ``moves_forwards``, F and I may also move relative to each other; F stay in their order, and so do I. If the
    host's order is not within the limits, ``moves_stages`` allows a rank's stages to move relative to each other, too.
    Each stage's W are in the order of its I, in which the host accumulates gradients.
    """
    own = split(schedule)
    numbered = _Numbered(own, times)
    most = memory_limits(schedule, extra_microbatches, fitting)
    fits = holds_within(schedule, most)
    best, shortest = (own, times.span_ms(own)) if fits else (None, math.inf)
    tried = [(numbered, rule) for rule in _rules(moves_forwards, overlap=times.between_steps is not None)]
    if moves_forwards and moves_stages and not fits:
        by_stage = (numbered, _Numbered(own, times.evened()))
        tried += [(each, rule) for each in by_stage for rule in _RULES_BY_STAGE]
    for limits in _tried_limits(schedule, most) if fitting else [most]:
        for each, rule in tried:
            order = _Simulation(each, limits, rule).run()
            if order is not None and (span := times.span_ms(order)) < shortest * (1.0 - 1e-9):
                shortest, best = span, order  # on a tie keep the order that needs less
    return best


def memory_limits(
    schedule: PipelineSchedule, extra_microbatches: int, fitting: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """Return how many microbatches each rank may hold.

    It is the maximum of the host's order plus ``extra_microbatches``, which may be negative, or what ``fitting`` has
    for the rank.
    """
    if not fitting:
        return (most_in_flight(schedule) + extra_microbatches,) * len(schedule.ranks)
    return tuple(fitting.get(rank, most_held(row)) for rank, row in enumerate(schedule.ranks))


def holds_within(schedule: PipelineSchedule, limits: tuple[int, ...]) -> bool:
    """Return whether no rank holds more microbatches than its limit."""
    return all(most_held(row) <= most for row, most in zip(schedule.ranks, limits, strict=True))


def _tried_limits(schedule: PipelineSchedule, most: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return limits to try, the lowest first.

    List scheduling may begin microbatches too early if a rank may hold more than its order needs.
    """
    fullest = most_in_flight(schedule)
    tried = [tuple(min(each, fullest + round(share * fullest)) for each in most) for share in _SHARES_MORE]
    return list(dict.fromkeys((*tried, most)))


def most_held(row: tuple[Action, ...]) -> int:
    """Return the most microbatches that a rank with this row holds at once."""
    held = most = 0
    for action in row:
        held += (action.kind is Kind.FORWARD) - action.freezable
        most = max(most, held)
    return most


class _Rules(NamedTuple):
    """How a rank chooses its next action. ``patience`` and ``forward_patience`` are shares of ``_PATIENCE``.

    They apply before a W and before an F. The second counts only if F and I move relative to each other (``moves``).

    With ``reserved``, a rank's stages move relative to each other, too. Its last stage may then fill all of the rank's
    memory. Each earlier stage leaves ``reserved`` microbatches free, and one more for each stage in between. This never
    deadlocks: the pipeline's last stage can always finish its microbatches, then the stage before it, and so on. With
    ``last_first`` the input gradients of a rank's last stage come first, without it those of its first stage.
    """

    patience: float
    moves: bool = False
    forward_patience: float = 0.0
    reserved: int = 0
    last_first: bool = True


_RULES_BY_STAGE = [
    _Rules(patience, moves=True, reserved=reserved, last_first=last_first)
    for patience in _PATIENCE
    for reserved in (1, 2)
    for last_first in (True, False)
]
"""Rules for less memory than the host's order needs."""


def _rules(moves_forwards: bool, overlap: bool) -> list[_Rules]:
    """Return the rules to try. Waits before an F pay where steps overlap: each rank's part of a step stays compact."""
    rules = [_Rules(patience) for patience in _PATIENCE]
    if moves_forwards:
        rules += [_Rules(patience, True, wait) for wait in (_PATIENCE if overlap else (0.0,)) for patience in _PATIENCE]
    return rules


def _halves(action: Action) -> tuple[Action, ...]:
    return (first_half(action), second_half(action)) if action.kind is Kind.BACKWARD else (action,)


class _Numbered:
    """The split order with actions as integers, for fast lookup: they count from 0 in the order of ``actions``."""

    def __init__(self, parts: PipelineSchedule, times: DeferralTimes) -> None:
        self.actions = parts.actions
        index = {action: number for number, action in enumerate(self.actions)}
        self.rank = [rank for rank, row in enumerate(parts.ranks) for _ in row]
        self.rows = [[index[action] for action in row] for row in parts.ranks]
        self.kind = [action.kind for action in self.actions]
        self.duration = [times.durations[action] + times.overhead.get(action, 0.0) for action in self.actions]
        self.weight = [index.get(second_half(a), -1) if a.kind is Kind.INPUT_GRAD else -1 for a in self.actions]
        self.forward = [index.get(replace(a, kind=Kind.FORWARD), -1) for a in self.actions]
        self.source, self.delay = [-1] * len(self.actions), [0.0] * len(self.actions)
        self.targets: list[list[int]] = [[] for _ in self.actions]
        for source, target in parts.transfers():
            self.source[index[target]] = index[source]
            self.delay[index[target]] = times.communication.get((source, target), 0.0)
            self.targets[index[source]].append(index[target])


class _Queue(NamedTuple):
    """Actions that keep their order. A forward starts only if its rank holds fewer than ``most`` microbatches."""

    actions: deque[int]
    most: int


def _queues(row: list[int], numbered: _Numbered, most: int, rules: _Rules) -> list[_Queue]:
    """Return the queues of a rank, the first one to run first. ``most`` is how many microbatches the rank may hold."""
    own = [number for number in row if numbered.kind[number] is not Kind.WEIGHT_GRAD]
    if not rules.moves:
        return [_Queue(deque(own), most)]
    input_grads = [number for number in own if numbered.kind[number] is Kind.INPUT_GRAD]
    forwards = [number for number in own if numbered.kind[number] is Kind.FORWARD]
    if not rules.reserved:
        return [_Queue(deque(input_grads), most), _Queue(deque(forwards), most)]
    backward_queues: list[_Queue] = []
    forward_queues: list[_Queue] = []
    for later, stage in enumerate(sorted({numbered.actions[number].stage for number in own}, reverse=True)):
        free = rules.reserved + later - 1 if later else 0
        for queues, numbers in ((backward_queues, input_grads), (forward_queues, forwards)):
            of_stage = deque(number for number in numbers if numbered.actions[number].stage == stage)
            queues.append(_Queue(of_stage, most - free))
    if not rules.last_first:
        backward_queues.reverse()
    return backward_queues + forward_queues


class _Rank:
    """One rank during the simulation: its remaining actions, and the microbatches that it holds.

    If both a forward and an input gradient may run, the input gradient comes first: it frees memory, and other ranks
    wait for it.
    """

    def __init__(self, queues: list[_Queue]) -> None:
        self.queues = queues
        self.weights: deque[int] = deque()
        self.order: list[int] = []
        self.held = 0
        self.parked = False


class _Simulation:
    """List scheduling in the order of time."""

    def __init__(self, numbered: _Numbered, limits: tuple[int, ...], rules: _Rules) -> None:
        self._n, self._rules = numbered, rules
        rows = zip(numbered.rows, limits, strict=True)
        self._ranks = [_Rank(_queues(row, numbered, most, rules)) for row, most in rows]
        self._end: list[float | None] = [None] * len(numbered.actions)
        self._free: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(self._ranks))]

    def run(self) -> PipelineSchedule | None:
        """Return the batch's order; None for a deadlock."""
        while self._free:
            now, number = heapq.heappop(self._free)
            self._act(self._ranks[number], number, now)
        if any(rank.weights or any(queue.actions for queue in rank.queues) for rank in self._ranks):
            return None
        actions = self._n.actions
        return PipelineSchedule(tuple(tuple(actions[number] for number in rank.order) for rank in self._ranks))

    def _act(self, rank: _Rank, number: int, now: float) -> None:
        next_input = math.inf
        for queue, most in rank.queues:
            if not queue or (self._n.kind[queue[0]] is Kind.FORWARD and rank.held >= most):
                continue
            ready = self._ready(queue[0])
            if ready > now:
                next_input = min(next_input, ready)
            elif next_input - now >= self._rules.forward_patience * self._n.duration[queue[0]]:
                self._start(rank, number, queue.popleft(), now)
                return
        if rank.weights and next_input - now >= self._rules.patience * self._n.duration[rank.weights[0]]:
            self._start(rank, number, rank.weights.popleft(), now)
        elif next_input < math.inf:
            heapq.heappush(self._free, (next_input, number))
        else:
            rank.parked = True

    def _start(self, rank: _Rank, number: int, action: int, now: float) -> None:
        end = self._end[action] = now + self._n.duration[action]
        rank.order.append(action)
        kind = self._n.kind[action]
        if kind is Kind.FORWARD:
            rank.held += 1
        elif kind is Kind.WEIGHT_GRAD:
            rank.held -= 1
        else:
            rank.weights.append(self._n.weight[action])
        heapq.heappush(self._free, (end, number))
        for target in self._n.targets[action]:
            other = self._n.rank[target]
            if self._ranks[other].parked:
                self._ranks[other].parked = False
                heapq.heappush(self._free, (end, other))

    def _ready(self, action: int) -> float:
        """Return when the action's input arrives; infinity if it is not yet known."""
        source, forward = self._n.source[action], self._n.forward[action]
        if forward != action and self._end[forward] is None:
            return math.inf
        if source < 0:
            return 0.0
        end = self._end[source]
        return math.inf if end is None else end + self._n.delay[action]


def joined(order: PipelineSchedule, host: Container[Action]) -> PipelineSchedule:
    """Join stage 0's I and W to the ``host``'s B where they are adjacent, because no other rank waits for these I."""
    rows = []
    for row in order.ranks:
        halves = {i for i, w in pairwise(row) if i.stage == 0 and i.kind is Kind.INPUT_GRAD and w == second_half(i)}
        together = {i for i in halves if backward_of(i) in host}
        after = {second_half(i) for i in together}
        rows.append(tuple(backward_of(a) if a in together else a for a in row if a not in after))
    return PipelineSchedule(tuple(rows))
