"""An order of all sends and receives of a schedule that cannot deadlock.

All actions of a schedule are put into one sequence that respects its graph. A message has the position of its source.
Every rank begins its transfers in this sequence: a send right after its action, and a receive before the rank's first
action after the message. No deadlock is then possible, even if each transfer blocks its rank until it has arrived, or
queues behind all earlier transfers of its rank.

Proof: suppose an item of the sequence is never done, and take the first. If it is an action, it waits for earlier
actions of its rank and earlier messages to its rank. If it is a message, it waits for its source, for the receiver's
actions before the receive begins, and for messages that either end began earlier. All these items come earlier in the
sequence, so they are done. Then the item gets done too, which is a contradiction.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from tf_adapters.schedule.ir import Action, PipelineSchedule


class Receives(NamedTuple):
    """An order's ``receive_points`` and ``messages_taken``."""

    before: Mapping[Action, tuple[Action, ...]]
    taken: Mapping[Action, int]


def assumed_receives(order: PipelineSchedule) -> Receives:
    """Return when ranks begin to receive in an order of unknown times, which may lack backwards.

    Every action takes as long as any other.
    """
    places = {action: float(place) for place, action in enumerate(order.execution_order())}
    return Receives(receive_points(order, places), messages_taken(order))


def receives_at(order: PipelineSchedule, start_ms: Mapping[Action, float], ms: Mapping[Action, float]) -> Receives:
    """Return when ranks begin to receive in an order whose actions start at ``start_ms`` and take ``ms``."""
    ends = {action: start_ms[action] + ms[action] for action in order.actions}
    return Receives(receive_points(order, ends), messages_taken(order))


def in_time(schedule: PipelineSchedule, end_ms: Mapping[Action, float]) -> tuple[Action, ...]:
    """Return all actions in one sequence that respects the schedule's graph, sorted by end time where it allows that.

    The result depends only on the arguments. ``end_ms`` may lack actions or contradict the graph.
    """
    number = {action: n for n, action in enumerate(schedule.actions)}
    return schedule.sorted_by(lambda action: (end_ms.get(action, 0.0), number[action]))


def receive_points(schedule: PipelineSchedule, end_ms: Mapping[Action, float]) -> dict[Action, tuple[Action, ...]]:
    """Map an action to the actions whose inputs its rank begins to receive before it, in order."""
    place = {action: n for n, action in enumerate(in_time(schedule, end_ms))}
    sources = schedule.received
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
    """For each action with input from another rank, count the messages that the other rank had received from this one.

    The other rank waited for these messages before it sent the input. This rank can therefore free them once the input
    has arrived.
    """
    home, sources = schedule.home, schedule.received
    found: dict[Action, int] = {}
    for row in schedule.ranks:
        had = Counter[int]()
        for action in row:
            if action in sources:
                had[home[sources[action].stage]] += 1
            target = schedule.target.get(action)
            if target is not None and target in sources:
                found[target] = had[home[target.stage]]
    return found
