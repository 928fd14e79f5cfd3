"""Step boundaries: ranks that update independently of each other end their steps before the same batch."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tf_adapters.collectives import Collectives
from tf_adapters.hosts.boundaries import PATIENCE, HeldSinceUpdate, StepBoundaries

Updates = Sequence[Sequence[int]]
"""By batch, the optimizers of a rank that step after it, in order."""


class Board:
    """What the ranks of one process share. A rank that waits alone fails the test."""

    def __init__(self, ranks: int) -> None:
        self.values: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=20)


class Threads(Collectives):
    """Messages between threads, each of which is a rank."""

    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self._board, self.messages = rank, board, 0

    def gather(self, value: Any) -> list[Any]:
        self.messages += 1
        self._board.values[self.rank] = value
        self._board.barrier.wait()
        values = list(self._board.values)
        self._board.barrier.wait()
        return values


def lengths_of(updates: Updates, rank: int, board: Board, interval: int) -> tuple[list[int], int, list[int]]:
    """Return the number of batches of each step of this rank, its messages, and the batches that closed a step."""
    collectives = Threads(rank, board)
    boundaries = StepBoundaries(collectives, optimizers=2, learning_interval=interval)
    lengths: list[int] = []
    closed = []
    for number, stepped in enumerate(updates):
        if boundaries.ends():
            lengths.append(boundaries.batches)
            boundaries.step_ended(len(lengths))
        boundaries.begin_batch()
        closes = [boundaries.stepped(optimizer) for optimizer in stepped]
        if any(closes):
            closed.append(number)
    if boundaries.ends_here():
        lengths.append(boundaries.batches)
    return lengths, collectives.messages, closed


def run(ranks: Sequence[Updates], interval: int = 1_000) -> list[Any]:
    board = Board(len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: lengths_of(ranks[rank], rank, board, interval), range(len(ranks))))


BOTH, NONE = (0, 1), ()


@pytest.mark.parametrize("interval", [1, 2, 1_000])
def test_ranks_end_their_steps_together_whoever_updates(interval: int) -> None:
    draw = random.Random(interval)
    choices = [BOTH, BOTH, NONE, (0,), (1,), (1, 0, 0, 1)]
    for _ in range(60):
        batches = draw.randint(1, 30)
        ranks = run([[draw.choice(choices) for _ in range(batches)] for _ in range(3)], interval)
        assert len({(tuple(lengths), messages) for lengths, messages, _ in ranks}) == 1
        lengths = ranks[0][0]
        ends = {sum(lengths[: number + 1]) - 1 for number in range(len(lengths))}
        assert all(ends.issuperset(closed) for _, _, closed in ranks)  # a step that a rank closes ends on all


@pytest.mark.parametrize("skipping", range(4))
def test_one_rank_skips_an_update(skipping: int) -> None:
    skips = [NONE if number == skipping else BOTH for number in range(4)]
    for lengths, messages, _ in run([[BOTH] * 4, skips]):
        assert lengths == [1] * 4
        assert messages == 3  # after each of the first two batches and after the last


def test_accumulation_is_learned_even_if_a_rank_skips_the_first_update() -> None:
    four = [NONE, NONE, NONE, BOTH]
    for lengths, messages, _ in run([four * 3, [NONE] * 4 + four * 2]):
        assert lengths == [4, 4, 4]
        assert messages == 9


def test_another_number_of_batches_per_update_is_learned_again() -> None:
    one, two = [BOTH], [NONE, BOTH]
    lengths = run([two * 2 + one * 8 + two * 6] * 2, interval=4)[0][0]
    assert lengths == [2] * 4 + [1] * 4 + [2] * 6


def test_without_updates_ranks_soon_send_few_messages() -> None:
    batches = 4 * PATIENCE
    for lengths, messages, _ in run([[NONE] * batches] * 2):
        assert lengths == []
        assert messages == PATIENCE + 3


def test_a_late_first_update_ends_the_step() -> None:
    late = PATIENCE + 10
    for lengths, _, closed in run([[NONE] * late + [BOTH] + [NONE] * PATIENCE] * 2):
        assert lengths == [2 * PATIENCE]
        assert closed == []  # not in an update after which the ranks send no message


def test_only_what_all_batches_froze_is_held() -> None:
    first, second = (torch.nn.Linear(2, 2) for _ in range(2))
    optimizers = [torch.optim.SGD(layer.parameters()) for layer in (first, second)]
    held = HeldSinceUpdate(optimizers)
    held.add_batch([first.weight, first.bias, second.weight])
    assert held.take(optimizers[1]) == [second.weight]
    held.add_batch([first.weight, second.bias])  # the first optimizer has skipped its update
    assert held.take(optimizers[0]) == [first.weight]
    assert held.take(optimizers[0]) == []
    assert held.take(optimizers[1]) == [second.bias]


def test_a_parameter_of_no_optimizer_is_held_in_each() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([layer.weight])
    held = HeldSinceUpdate([optimizer])
    held.add_batch([layer.bias])
    assert held.take(optimizer) == [layer.bias]
