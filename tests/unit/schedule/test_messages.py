"""Sends and receives in one sequence: nothing hangs, even where every transfer blocks both of its ends."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from tf_adapters.schedule.deferral import DeferralTimes, defer, split
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.messages import in_time, messages_taken, receive_points
from tf_adapters.schedule.orders import gpipe, one_forward_one_backward

LENGTHS = {Kind.FORWARD: 1.0, Kind.INPUT_GRAD: 1.2, Kind.WEIGHT_GRAD: 1.0}


def orders() -> dict[str, PipelineSchedule]:
    found = {"gpipe": gpipe(3, 5)}
    for stages, microbatches in ((2, 4), (4, 8), (5, 3), (8, 16)):
        host = one_forward_one_backward(stages, microbatches)
        for extra in (0, 2, 4):
            durations = {action: LENGTHS[action.kind] for action in split(host).actions}
            times = DeferralTimes(durations, {}, {})
            found[f"{stages} x {microbatches}, {extra} extra"] = defer(host, times, extra_microbatches=extra)
    return found


ORDERS = orders()
each_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


def drawn(order: PipelineSchedule, seed: int) -> dict[Action, float]:
    """Ends that have nothing to do with the order."""
    random.seed(seed)
    return {action: random.random() for action in order.actions if random.random() < 0.9}


def late(order: PipelineSchedule) -> dict[Action, tuple[Action, ...]]:
    """Every receive right before its action."""
    return {target: (target,) for _, target in order.transfers()}


def hangs(order: PipelineSchedule, points: Mapping[Action, tuple[Action, ...]]) -> bool:
    """Whether the ranks wait for ever where a send or receive lasts until the other end is at it, too."""
    source = {target: source for source, target in order.transfers()}
    target = {source: target for target, source in source.items()}
    programs: list[list[Action | tuple[Action, Action]]] = []
    for row in order.ranks:
        program: list[Action | tuple[Action, Action]] = []
        for action in row:
            program += [(source[received], received) for received in points.get(action, ())]
            program.append(action)
            program += [(action, target[action])] if action in target else []
        programs.append(program)
    heads, moved = [0] * len(programs), True
    while moved:
        moved = False
        at = [program[head] if head < len(program) else None for program, head in zip(programs, heads, strict=True)]
        for rank, what in enumerate(at):
            if isinstance(what, Action) or (what is not None and at.count(what) == 2):
                heads[rank] += 1
                moved = True
    return any(head < len(program) for program, head in zip(programs, heads, strict=True))


@each_order
def test_the_sequence_respects_the_graph(order):
    for seed in range(5):
        sequence = in_time(order, drawn(order, seed))
        place = {action: number for number, action in enumerate(sequence)}
        assert len(place) == len(order.actions)
        assert all(place[source] < place[target] for source, target in order.transfers())
        assert [[a for a in sequence if a in set(row)] for row in order.ranks] == [list(row) for row in order.ranks]


@each_order
def test_every_input_is_received_before_its_action_and_nothing_hangs(order):
    for seed in range(5):
        points = receive_points(order, drawn(order, seed))
        received = [target for targets in points.values() for target in targets]
        assert sorted(map(str, received)) == sorted(str(target) for _, target in order.transfers())
        for row in order.ranks:
            place = {action: number for number, action in enumerate(row)}
            assert all(place[at] <= place[target] for at in row for target in points.get(at, ()))
        assert not hangs(order, points)


def test_receives_right_before_their_actions_can_hang():
    """The check can fail, and 1F1B's own order is such a case: neighbours send to one another at once."""
    assert hangs(ORDERS["4 x 8, 0 extra"], late(ORDERS["4 x 8, 0 extra"]))
    assert hangs(ORDERS["4 x 8, 4 extra"], late(ORDERS["4 x 8, 4 extra"]))


@each_order
def test_what_a_rank_has_taken_when_it_sends_had_arrived_before(order):
    """A gradient that the rank before has not yet waited for counts as no gradient that has arrived."""
    source = {target: source for source, target in order.transfers()}
    taken = messages_taken(order)
    assert taken.keys() == source.keys()
    rank_of = {action: rank for rank, row in enumerate(order.ranks) for action in row}
    for received, count in taken.items():
        sender, mine = order.ranks[rank_of[source[received]]], rank_of[received]
        ran = sender[: sender.index(source[received]) + 1]
        assert count == sum(rank_of[source[action]] == mine for action in ran if action in source)
    assert len(order.ranks) < 3 or max(taken.values()) > 1
