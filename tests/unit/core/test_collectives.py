"""Decisions that all ranks take together: two real ranks over gloo, one of which fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pools import fork_ranks

from tf_adapters.collectives import (
    Collectives,
    ProcessGroupCollectives,
    RemoteError,
    decide_from_all,
    on_all_ranks,
    on_one_rank,
)
from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.testing import RankPool

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with fork_ranks(2) as started:
        yield started


def outcome(decide: Any, *what: Any) -> tuple[str, str] | Any:
    """On a rank: the value, or the error's type and text. A collective afterwards shows that nobody is left behind."""
    with closing(ProcessGroupCollectives()) as collectives:
        mine = what[collectives.rank]
        try:
            value = decide(collectives, lambda: _do(mine))
        except Exception as error:
            value = (type(error).__name__, str(error))
        assert collectives.gather(collectives.rank) == [0, 1]
    return value


def _do(what: Any) -> Any:
    if isinstance(what, Exception):
        raise what
    return what


# --- on all ranks --------------------------------------------------------------------------------------------


def test_every_rank_gets_every_ranks_value(pool: RankPool) -> None:
    assert pool.run(outcome, on_all_ranks, 0.1, {"b": None}) == [[0.1, {"b": None}]] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_is_raised_on_both_and_says_where(pool: RankPool, failing: int) -> None:
    what: list[Any] = ["fine", "fine"]
    what[failing] = ConfigError("x is 3")
    assert pool.run(outcome, on_all_ranks, *what) == [("ConfigError", f"rank {failing}: x is 3")] * 2


def test_the_same_error_on_all_ranks_is_said_once(pool: RankPool) -> None:
    what = [ConfigError("x is 3"), ConfigError("x is 3")]
    assert pool.run(outcome, on_all_ranks, *what) == [("ConfigError", "x is 3")] * 2


def test_different_texts_of_one_kind_keep_the_kind(pool: RankPool) -> None:
    what = [ConfigError("x is 3"), ConfigError("x is 4")]
    assert pool.run(outcome, on_all_ranks, *what) == [("ConfigError", "rank 0: x is 3; rank 1: x is 4")] * 2


def test_different_kinds_become_one_remote_error(pool: RankPool) -> None:
    what = [ConfigError("x is 3"), UnsupportedError("no")]
    assert pool.run(outcome, on_all_ranks, *what) == [("RemoteError", "rank 0: x is 3; rank 1: no")] * 2


def test_an_error_that_is_not_ours_arrives_as_a_remote_error_with_its_type(pool: RankPool) -> None:
    what = ["fine", KeyError("k")]
    assert pool.run(outcome, on_all_ranks, *what) == [("RemoteError", "rank 1: KeyError: 'k'")] * 2


# --- on one rank ---------------------------------------------------------------------------------------------


def test_rank_0_decides_and_both_get_its_value(pool: RankPool) -> None:
    assert pool.run(outcome, on_one_rank, [1, 2.5], ConfigError("never run")) == [[1, 2.5]] * 2


def test_an_error_of_the_deciding_rank_is_raised_on_both(pool: RankPool) -> None:
    assert pool.run(outcome, on_one_rank, ConfigError("x is 3"), "never run") == [("ConfigError", "x is 3")] * 2
    assert (
        pool.run(outcome, on_one_rank, ZeroDivisionError("0"), "never run")
        == [("RemoteError", "ZeroDivisionError: 0")] * 2
    )


def test_a_value_of_none_is_a_value(pool: RankPool) -> None:
    assert pool.run(outcome, on_one_rank, None, "never run") == [None, None]
    assert pool.run(outcome, on_all_ranks, None, None) == [[None, None]] * 2


# --- from all ranks, on one --------------------------------------------------------------------------------------

LONG = [list(range(1000)), "x" * 600 + "y" * 600, b"short"]
"""Messages of different lengths, two of which do not travel at once."""


@pytest.mark.parametrize("first", LONG, ids=["list", "text", "short"])
@pytest.mark.parametrize("second", LONG, ids=["list", "text", "short"])
def test_values_of_any_length_arrive(pool: RankPool, first: Any, second: Any) -> None:
    assert pool.run(outcome, on_all_ranks, first, second) == [[first, second]] * 2
    assert pool.run(outcome, decided, first, second) == [(first, second)] * 2


def decided(collectives: Any, local: Any) -> Any:
    return decide_from_all(collectives, local, tuple)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_has_nothing_to_decide_from_is_an_error_on_both(pool: RankPool, failing: int) -> None:
    what: list[Any] = [LONG[0], LONG[0]]
    what[failing] = ConfigError("x is 3")
    assert pool.run(outcome, decided, *what) == [("ConfigError", f"rank {failing}: x is 3")] * 2


def test_an_error_of_the_decision_is_raised_on_both(pool: RankPool) -> None:
    assert pool.run(outcome, refused, 1, 2) == [("UnsupportedError", "1 and 2 differ")] * 2


def refused(collectives: Any, local: Any) -> Any:
    def refuse(values: list[int]) -> None:
        raise UnsupportedError(f"{values[0]} and {values[1]} differ")

    return decide_from_all(collectives, local, refuse)


@pytest.mark.parametrize("decide", [on_all_ranks, decided, on_one_rank])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_value_that_cannot_be_sent_is_an_error_on_both(pool: RankPool, decide: Any, failing: int) -> None:
    results = pool.run(unsendable, decide, failing)
    if decide is on_one_rank and failing == 1:
        assert results == [[0], [0]]  # only rank 0's value travels
        return
    for kind, text in results:
        assert kind == "RemoteError"
        assert "a value cannot be sent to other ranks" in text


def unsendable(decide: Any, failing: int) -> Any:
    values: list[Any] = [[0], [0]]
    values[failing] = lambda: None
    return outcome(decide, *values)


def test_only_rank_0_collects(pool: RankPool) -> None:
    assert pool.run(collected) == [[0, 1], None]


def collected() -> Any:
    with closing(ProcessGroupCollectives()) as collectives:
        return collectives.collect(collectives.rank)


# --- groups --------------------------------------------------------------------------------------------------


def test_floats_travel_without_rounding(pool: RankPool) -> None:
    value = 0.1 + 0.2
    assert pool.run(outcome, on_one_rank, value, None) == [value, value]


def test_a_group_counts_its_own_ranks(pool: RankPool) -> None:
    """In a group of global rank 1 alone, that rank is rank 0 and broadcasts."""
    assert pool.run(in_a_group_of_the_last_rank) == [None, (0, ["mine"], "mine")]


def in_a_group_of_the_last_rank() -> Any:
    group = dist.new_group([1])
    if dist.get_rank() != 1:
        return None
    with closing(ProcessGroupCollectives(group)) as collectives:
        assert collectives.collect(LONG[0]) == [LONG[0]]
        return collectives.rank, collectives.gather("mine"), collectives.broadcast("mine")


def test_groups_of_the_same_ranks_one_after_another(pool: RankPool) -> None:
    """A job may attach again. No rank reads the address that another one had in the group before."""
    assert pool.run(groups_in_turn, 30) == [True] * 2


def groups_in_turn(number: int) -> bool:
    group = dist.new_group([0, 1])
    for turn in range(number):
        with closing(ProcessGroupCollectives(group)) as collectives:
            assert collectives.gather((turn, collectives.rank)) == [(turn, 0), (turn, 1)]
    return True


def test_ranks_that_are_in_other_numbers_of_groups() -> None:
    """The first and the last stage share a tied weight, and have a group for it that the stage between has not."""
    with fork_ranks(3) as ranks:
        assert ranks.run(beside_a_tied_weight) == [[0, 1, 2]] * 3


def beside_a_tied_weight() -> list[int]:
    dist.new_group([0, 2])
    pipeline = dist.new_group([0, 1, 2])
    with closing(ProcessGroupCollectives(pipeline)) as collectives:
        return collectives.gather(collectives.rank)


# --- the host's own group ------------------------------------------------------------------------------------


class Unreachable(dist.ProcessGroup):
    """A backend that sends nothing, in the place of NCCL: whatever goes over it fails."""

    def getBackendName(self) -> str:  # noqa: N802
        return "unreachable"


def join_unreachable() -> None:
    make = lambda store, rank, size, timeout: Unreachable(rank, size)  # noqa: E731
    dist.Backend.register_backend("unreachable", make, devices=["cpu"])
    dist.init_process_group("unreachable")


def test_no_message_goes_over_the_hosts_group() -> None:
    with fork_ranks(2, join_unreachable) as pool:
        assert pool.run(default_group_sends_nothing) == [True] * 2
        for first in LONG:
            assert pool.run(outcome, on_all_ranks, first, LONG[1]) == [[first, LONG[1]]] * 2
            assert pool.run(outcome, decided, LONG[1], first) == [(LONG[1], first)] * 2
            assert pool.run(outcome, on_one_rank, first, None) == [first] * 2


def default_group_sends_nothing() -> bool:
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.zeros(1))
    return True


def test_torch_does_not_know_our_group(pool: RankPool) -> None:
    """So nothing of ours is left after closing, and a host that destroys its groups does not touch it."""
    assert pool.run(groups_of_torch) == [0, 0]


def groups_of_torch() -> int:
    before = set(dist.distributed_c10d._world.pg_map)
    collectives = ProcessGroupCollectives()
    assert collectives.gather(1) == [1, 1]
    made = set(dist.distributed_c10d._world.pg_map) - before
    collectives.close()
    collectives.close()  # again is nothing
    return len(made)


def test_messages_wait_as_long_as_the_hosts(pool: RankPool) -> None:
    """A node that disappears closes no connection: its neighbours end when they have waited long enough."""
    assert pool.run(timeouts) == [(77.0, 77.0)] * 2


def timeouts() -> tuple[float, float]:
    world = dist.group.WORLD
    before = _timeout(world)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), world)
    with closing(ProcessGroupCollectives()) as collectives:
        ours = collectives._group.options._timeout
        assert collectives.gather(1) == [1, 1]  # a rank that closed now could leave while the other one still connects
    found = _timeout(world), ours
    dist.distributed_c10d._set_pg_timeout(before, world)
    return found[0].total_seconds(), found[1].total_seconds()


def _timeout(group: Any) -> timedelta:
    limit = group._get_backend(torch.device("cpu")).options._timeout
    assert isinstance(limit, timedelta)
    return limit


def test_a_single_process_needs_no_group() -> None:
    assert on_all_ranks(Collectives(), lambda: 3) == [3]
    assert on_one_rank(Collectives(), lambda: 3) == 3
    with pytest.raises(ConfigError, match=r"^x is 3$"):
        on_all_ranks(Collectives(), lambda: _do(ConfigError("x is 3")))
    with pytest.raises(RemoteError, match=r"^ValueError: v$"):
        on_one_rank(Collectives(), lambda: _do(ValueError("v")))
