"""When a rank begins to receive: an order of all sends and receives in which no two ranks wait for one another.

All actions of a schedule stand in one sequence that respects its graph, and a message stands where its source does.
Every rank begins its transfers in that sequence: a send right after its action, a receive before the first action of
its own that stands behind the message. Then nothing can hang, however much the transfers wait for one another: even if
each blocked its rank until it has arrived, or queued behind all that its rank began before.

Take the first of the sequence that is never done. An action waits for actions of its rank and messages to its rank that
stand before it. A message waits for its source, for the receiver's actions before the point where the receive begins,
and for the messages that either end began earlier. All of these stand before it, so they are done, and so is it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from itertools import chain, pairwise
from typing import NamedTuple

from tf_adapters.schedule.ir import Action, PipelineSchedule

__all__ = ["Receives", "in_time", "messages_taken", "receive_points"]


class Receives(NamedTuple):
    """An order's ``receive_points`` and ``messages_taken``."""

    before: Mapping[Action, tuple[Action, ...]]
    taken: Mapping[Action, int]


def in_time(schedule: PipelineSchedule, end_ms: Mapping[Action, float]) -> tuple[Action, ...]:
    """All actions in one sequence that respects the schedule's graph, and else the times at which they are to end.

    The same on every rank that has the same arguments. ``end_ms`` may lack actions or contradict the graph.
    """
    after: defaultdict[Action, list[Action]] = defaultdict(list)
    waits_for: Counter[Action] = Counter()
    for before, action in chain(schedule.transfers(), *(pairwise(row) for row in schedule.ranks)):
        after[before].append(action)
        waits_for[action] += 1
    number = {action: n for n, action in enumerate(schedule.actions)}
    ready = [(end_ms.get(action, 0.0), n, action) for action, n in number.items() if not waits_for[action]]
    heapq.heapify(ready)
    sequence = []
    while ready:
        _, _, done = heapq.heappop(ready)
        sequence.append(done)
        for action in after[done]:
            waits_for[action] -= 1
            if not waits_for[action]:
                heapq.heappush(ready, (end_ms.get(action, 0.0), number[action], action))
    return tuple(sequence)


def receive_points(schedule: PipelineSchedule, end_ms: Mapping[Action, float]) -> dict[Action, tuple[Action, ...]]:
    """By the action before which a rank begins to receive: the actions whose inputs these are, in order."""
    place = {action: n for n, action in enumerate(in_time(schedule, end_ms))}
    sources = _between_ranks(schedule)
    points: dict[Action, tuple[Action, ...]] = {}
    for row in schedule.ranks:
        coming = deque(sorted((a for a in row if a in sources), key=lambda action: place[sources[action]]))
        for action in row:
            begun = []
            while coming and place[sources[coming[0]]] < place[action]:
                begun.append(coming.popleft())
            if begun:
                points[action] = tuple(begun)
    return points


def messages_taken(schedule: PipelineSchedule) -> dict[Action, int]:
    """By an action whose input comes from another rank: how many of this rank's messages to it that one has had.

    It had waited for them before it sent that input: they need not be kept longer.
    """
    home, sources = schedule.home, _between_ranks(schedule)
    targets = {source: target for target, source in sources.items()}
    found: dict[Action, int] = {}
    for row in schedule.ranks:
        had = Counter[int]()
        for action in row:
            if action in sources:
                had[home[sources[action].stage]] += 1
            if action in targets:
                found[targets[action]] = had[home[targets[action].stage]]
    return found


def _between_ranks(schedule: PipelineSchedule) -> dict[Action, Action]:
    """The source of every action whose input comes from another rank."""
    return {target: source for source, target in schedule.transfers() if schedule.leaves_rank(source, target)}
