"""Megatron's schedules as we read them from its own tables: exact lists, and every size fits together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from schedules import one_f_one_b

from tf_adapters.collectives import Collectives
from tf_adapters.errors import ScheduleError
from tf_adapters.megatron.placement import PipelinePosition
from tf_adapters.megatron.schedules import actions_of_order, local_row, translate
from tf_adapters.megatron.send_waits import Row, send_waits
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


class Group:
    """What the tables need of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.fixture(autouse=True)
def _no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's communicator asks for its neighbours' global ranks when it is made."""
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: rank)


def settings(chunks: int, group_size: int | None = None, overlaps: bool = True) -> Any:
    """The part of a model's config that the schedule follows from."""
    return SimpleNamespace(
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        microbatch_group_size_per_vp_stage=group_size,
        overlap_p2p_comm=overlaps,
    )


def row_of(
    rank: int, size: int, microbatches: int, chunks: int = 1, group_size: int | None = None, overlaps: bool = True
) -> Row:
    position = PipelinePosition(rank, size, chunks)
    config = settings(chunks, group_size or size, overlaps)
    return local_row(position, config, Group(rank, size), microbatches)


def of_rank(
    rank: int, size: int, microbatches: int, chunks: int = 1, group_size: int | None = None
) -> tuple[Action, ...]:
    return row_of(rank, size, microbatches, chunks, group_size).actions


def all_ranks(size: int, microbatches: int, chunks: int = 1, group_size: int | None = None) -> PipelineSchedule:
    return PipelineSchedule(tuple(of_rank(rank, size, microbatches, chunks, group_size) for rank in range(size)))


def texts(actions: Sequence[Action]) -> str:
    return " ".join(map(str, actions))


def by_chunk(text: str, rank: int, size: int) -> str:
    """Actions from Megatron's view of a rank, where ``F1.0`` is chunk 1's forward of microbatch 0."""
    actions = []
    for word in text.split():
        chunk, microbatch = map(int, word[1:].split("."))
        actions.append(Action(chunk * size + rank, Kind(word[0]), microbatch))
    return texts(actions)


# --- exact lists -----------------------------------------------------------------------------------------------


def test_no_pipelining() -> None:
    assert texts(of_rank(0, 1, 3)) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_1f1b_of_two_stages() -> None:
    """::

    rank 0 | F0 F1 .  B0 F2 B1 F3 B2 .  B3
    rank 1 | .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    assert texts(of_rank(0, 2, 4)) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    assert texts(of_rank(1, 2, 4)) == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"


def test_1f1b_with_fewer_microbatches_than_warm_up_forwards() -> None:
    """::

    rank 0 | F0 F1 .  .  .  .  .  B0 .  B1
    rank 1 | .  F0 F1 .  .  .  B0 .  B1
    rank 2 | .  .  F0 F1 .  B0 .  B1
    rank 3 | .  .  .  F0 B0 F1 B1
    """
    assert [texts(of_rank(rank, 4, 2)) for rank in range(4)] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]


def test_interleaved_1f1b_of_two_ranks_with_two_chunks() -> None:
    """Forwards of all chunks for a group of two microbatches, then of the next group; backwards likewise::

    rank 0, warm-up of 4 | F0.0 F0.1 F1.0 F1.1 | F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 | B1.2 B1.3 B0.2 B0.3
    rank 1, warm-up of 2 | F0.0 F0.1 | F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 | B0.2 B0.3
    """
    assert texts(of_rank(0, 2, 4, chunks=2, group_size=2)) == by_chunk(
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3", rank=0, size=2
    )
    assert texts(of_rank(1, 2, 4, chunks=2, group_size=2)) == by_chunk(
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3", rank=1, size=2
    )
    assert texts(of_rank(0, 2, 4, chunks=2, group_size=2)).startswith("0F0 0F1 2F0 2F1 0F2 2B0 ")
    assert texts(of_rank(1, 2, 4, chunks=2, group_size=2)).startswith("1F0 1F1 3F0 3B0 ")


def test_groups_of_three_with_a_last_group_of_two() -> None:
    assert texts(of_rank(0, 2, 8, chunks=2, group_size=3)) == by_chunk(
        "F0.0 F0.1 F0.2 F1.0 F1.1 "
        "F1.2 B1.0 F0.3 B1.1 F0.4 B1.2 F0.5 B0.0 F1.3 B0.1 F1.4 B0.2 F1.5 B1.3 F0.6 B1.4 F0.7 B1.5 F1.6 B0.3 F1.7 B0.4 "
        "B0.5 B1.6 B1.7 B0.6 B0.7",
        rank=0,
        size=2,
    )
    assert texts(of_rank(1, 2, 8, chunks=2, group_size=3)) == by_chunk(
        "F0.0 F0.1 F0.2 "
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F0.3 B0.0 F0.4 B0.1 F0.5 B0.2 F1.3 B1.3 F1.4 B1.4 F1.5 B1.5 "
        "F0.6 B0.3 F0.7 B0.4 F1.6 B0.5 F1.7 B1.6 B1.7 B0.6 B0.7",
        rank=1,
        size=2,
    )


def test_interleaved_with_all_microbatches_in_the_warm_up() -> None:
    assert texts(of_rank(0, 2, 2, chunks=2, group_size=2)) == by_chunk(
        "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1", rank=0, size=2
    )
    assert texts(of_rank(1, 2, 2, chunks=2, group_size=2)) == by_chunk(
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1", rank=1, size=2
    )


def test_three_chunks_of_one_rank_are_stages_as_activations_flow() -> None:
    position = PipelinePosition(rank=1, size=4, chunks=3)
    assert [position.stage(chunk) for chunk in range(3)] == [1, 5, 9]
    assert {action.stage for action in of_rank(1, 4, 8, chunks=3)} == {1, 5, 9}


def test_an_order_numbers_each_chunks_microbatches_upwards() -> None:
    """The example in the docstring of Megatron's ``convert_schedule_table_to_order``."""
    order = [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]
    assert texts(actions_of_order(order, PipelinePosition(0, 2, 2))) == by_chunk(
        "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 F0.3 B1.1 F0.4 B1.2 F1.3 B0.0 F1.4 B0.1 B0.2 B1.3 B1.4 B0.3 B0.4",
        rank=0,
        size=2,
    )


# --- every size ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 7))
def test_without_interleaving_it_is_1f1b(size: int) -> None:
    for microbatches in range(1, 11):
        assert all_ranks(size, microbatches).validate() == one_f_one_b(size, microbatches), microbatches


def groups(size: int, microbatches: int) -> list[int]:
    """The group sizes that Megatron takes: from the pipeline's size on, and no last group that is smaller."""
    return [
        group for group in range(size, microbatches + 1) if microbatches % group == 0 or microbatches % group >= size
    ]


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_interleaved_schedules_of_every_size_can_run(size: int, chunks: int) -> None:
    seen = 0
    for microbatches in range(size, 13):
        for group_size in groups(size, microbatches):
            schedule = all_ranks(size, microbatches, chunks, group_size).validate()
            assert (schedule.num_stages, schedule.num_microbatches) == (size * chunks, microbatches)
            assert len(schedule.actions) == 2 * size * chunks * microbatches
            for rank in range(size):
                assert schedule.stages_of(rank) == tuple(range(rank, size * chunks, size))
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_last_rank_goes_back_as_soon_as_it_has_the_loss(chunks: int) -> None:
    actions = of_rank(3, 4, 8, chunks)
    last = 4 * chunks - 1
    first = actions.index(Action(last, Kind.FORWARD, 0))
    assert actions[first + 1] == Action(last, Kind.BACKWARD, 0)


# --- all ranks together ----------------------------------------------------------------------------------------


class Ranks(Collectives):
    """Collectives that answer with what the other ranks are told to have sent."""

    def __init__(self, rank: int, rows: Sequence[tuple[int, Row]]) -> None:
        self.rank = rank
        self._rows = rows

    def gather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [(row, None) for row in self._rows]
        everyone[self.rank] = value
        return everyone

    def broadcast(self, value: Any) -> Any:
        raise NotImplementedError


def translated(rank: int, size: int, rows: Sequence[Any], chunks: int = 1, microbatches: int = 4) -> PipelineSchedule:
    position = PipelinePosition(rank % size, size, chunks)
    collectives = Ranks(rank, rows)
    return translate(collectives, position, settings(chunks, 2), microbatches, Group(rank % size, size))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_rank_gets_the_schedule_of_all(replicas: int, chunks: int) -> None:
    rows = [(rank, row_of(rank, 2, 4, chunks, 2)) for rank in range(2)] * replicas
    for rank in range(2 * replicas):
        assert translated(rank, 2, rows, chunks) == all_ranks(2, 4, chunks, 2)


def test_ranks_may_come_in_any_order() -> None:
    """Where tensor or data parallelism comes before the pipeline: global ranks 0 and 1 are both its rank 0."""
    first, second = ((rank, row_of(rank, 2, 4)) for rank in range(2))
    position = PipelinePosition(0, 2, 1)
    schedule = translate(Ranks(1, [first, first, second, second]), position, settings(1), 4, Group(0, 2))
    assert schedule == all_ranks(2, 4)


@pytest.mark.parametrize("rank", range(4))
def test_replicas_that_disagree_are_refused_on_all_ranks_and_shown(rank: int) -> None:
    rows = [(r, row_of(r, 2, 4)) for r in range(2)] * 2
    rows[3] = (1, replace(row_of(1, 2, 4), actions=of_rank(1, 2, 4)[:-2]))
    if rank == 3:  # this one makes its own row: the others are told to differ from it
        rows[1], rows[3] = rows[3], rows[1]
    with pytest.raises(ScheduleError) as caught:
        translated(rank, 2, rows)
    message = str(caught.value)
    assert message.startswith("two replicas of pipeline rank 1 run different schedules:\n")
    assert "1F0  1B0  1F1  1B1  1F2  1B2  1F3  1B3" in message
    assert "1F0  1B0  1F1  1B1  1F2  1B2\n" in message + "\n"


def test_pipeline_ranks_that_do_not_fit_together_are_refused() -> None:
    rows = [(0, row_of(0, 2, 4)), (1, row_of(1, 2, 3))]
    with pytest.raises(ScheduleError, match="stage 1 never runs microbatch 3"):
        translated(0, 2, rows)


# --- sends that wait for their receivers -----------------------------------------------------------------------


def waits_of(size: int, microbatches: int, overlaps: bool) -> set[str]:
    rows = [row_of(rank, size, microbatches, 2, size, overlaps) for rank in range(size)]
    return {f"{wait.posted}<{wait.blocked}" for wait in send_waits(rows)}


def test_outside_the_steady_phase_a_rank_waits_until_its_receiver_is_free() -> None:
    """Rank 0 has no steady phase; rank 1 runs 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1."""
    waits = waits_of(2, 2, overlaps=True)
    assert "1F0<2F0" in waits  # 0F1's result is received once 1F0 has run, and 2F0 comes after that send
    assert "3B1<2B1" in waits  # 2B0's gradient is received once 3B1 has run


def test_with_overlap_a_steady_send_is_waited_for_once_the_next_action_of_its_kind_has_run() -> None:
    """Rank 0: 0F0 0F1 2F0 2F1, steady 0F2 2B0 0F3 2B1; rank 1: 1F0 1F1, steady 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2."""
    waits = waits_of(2, 4, overlaps=True)
    # 1B0's gradient is received from 2B1's end on; after 1B1 rank 1 waits for that, then runs 3F2.
    assert "2B1<3F2" in waits
    assert "1B0<2F2" not in waits


def test_without_overlap_a_forward_and_a_backward_are_exchanged_together() -> None:
    waits = waits_of(2, 4, overlaps=False)
    assert "3B0<0F2" in waits  # 0F2 is of a pair with 2B0, whose input is 3B0's gradient
    assert "2B0<1F2" in waits  # 0F2's result is sent once 2B0 has run
    assert "1B0<2F2" in waits  # 2B1's gradient is received once the pair of 1F2 and 1B0 has run


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("chunks", [2, 3])
def test_ranks_that_wait_for_their_receivers_come_to_an_end(
    chunks: int, size: int, rounds: int, overlaps: bool
) -> None:
    rows = [row_of(rank, size, rounds * size, chunks, size, overlaps) for rank in range(size)]
    waits = send_waits(rows)
    assert waits  # none says that they would wait for ever
    schedule = PipelineSchedule(tuple(row.actions for row in rows), waits)
    at = {action: number for number, action in enumerate(schedule.execution_order((w[0], w[1]) for w in waits))}
    assert all(at[wait.posted] < at[wait.blocked] for wait in waits)
