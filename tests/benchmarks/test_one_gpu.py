"""The pipeline on one GPU without a GPU: the transport between ranks, what makes times void, the four streams."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pools import fork_ranks

from benchmarks.gpu import four_streams, one_gpu_group, probe, quarters
from benchmarks.gpu.one_gpu_group import OneGpuGroup, join_one_gpu
from benchmarks.gpu.parts import Options
from benchmarks.gpu.pipeline_on_one_gpu import ALONE, WAYS, Facts, table, void_reasons
from tf_adapters.schedule.ir import Action
from tf_adapters.schedule.orders import one_forward_one_backward

TINY = Options("cpu", tiny=True)
VALID = Facts(
    sms=[[0, 1], [2, 3]],
    interference=[{"products": 1.01, "memory": 1.4}, {"products": 1.0, "memory": 1.2}],
    busy_ms={name: [100.0, 101.0] for name in WAYS},
    queued_ms={ALONE: [99.0, 100.0]},
)


# --- what makes times void -----------------------------------------------------------------------------------


def test_valid_facts_have_no_reason() -> None:
    assert void_reasons(VALID) == []


def test_shared_multiprocessors_make_times_void() -> None:
    facts = deepcopy(VALID)
    facts.sms[1].append(0)
    assert void_reasons(facts) == ["ranks 0 and 1 share multiprocessors"]


def test_processes_that_slow_each_other_make_times_void() -> None:
    facts = deepcopy(VALID)
    facts.interference[1]["products"] = 1.06
    assert void_reasons(facts) == ["matrix products take 1.06 times as long together as alone"]


def test_another_busy_time_makes_times_void_unless_the_way_freezes() -> None:
    facts = deepcopy(VALID)
    facts.busy_ms["1F1B, paper"] = [70.0, 70.0]
    assert void_reasons(facts) == []
    facts.busy_ms["ZBV, exact"] = [100.0, 98.0]
    assert void_reasons(facts) == ["ZBV, exact: a rank computes 3.0% longer or shorter than with the host alone"]


def test_gaps_between_launches_make_times_void() -> None:
    facts = deepcopy(VALID)
    facts.queued_ms[ALONE][1] = 97.0
    assert void_reasons(facts) == ["1F1B: launches leave gaps of 4.1%"]


def test_the_table_has_planned_beside_measured() -> None:
    values = {
        "1F1B: step": 200.0,
        "1F1B: losses are the host's, to the bit": 1.0,
        "ZBV, exact: step": 100.0,
        "ZBV, exact: planned step": 99.0,
        "ZBV, exact: speed over 1F1B alone": 2.0,
        "ZBV, exact: losses are the host's, to the bit": 0.0,
    }
    assert table([{"name": name, "value": value} for name, value in values.items()]) == [
        ["1F1B alone", "200.0", "-", "1.000x", "same bits"],
        ["ZBV, exact", "100.0", "99.0", "2.000x", "**other bits**"],
    ]


# --- the transport -------------------------------------------------------------------------------------------


def ring() -> tuple[float, float]:
    """More messages than slots around a ring, and one to itself."""
    right = probe.transfers(TINY)
    group, mine = dist.group.WORLD, torch.arange(3.0)
    assert isinstance(group, OneGpuGroup)
    with tempfile.TemporaryDirectory() as own:
        group.open(Path(quarters.gathered(own)[0]), slot_bytes=64)
        received = torch.zeros(3)
        works = [dist.isend(mine, dist.get_rank()), dist.irecv(received, dist.get_rank())]
        for work in works:
            work.wait()
            work.wait()  # a second time changes nothing
        with pytest.raises(ValueError, match="a message of 128 bytes is larger than a slot of 64"):
            dist.isend(torch.zeros(32), dist.get_rank())
        dist.barrier()
    return right, float(received.sum())


@pytest.mark.distributed
def test_messages_come_in_order_and_slots_are_used_again() -> None:
    assert probe.MESSAGES > one_gpu_group.SLOTS
    with fork_ranks(2, join_one_gpu) as ranks:
        assert ranks.run(ring) == [(probe.MESSAGES, 3.0)] * 2


def test_a_message_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_gpu_group, "WAIT_S", 0.01)
    with pytest.raises(TimeoutError, match=r"waited 0.01 s for rank 0-1 to post message 3"):
        one_gpu_group.wait_until(lambda: False, "0-1 to post message 3")


def test_without_its_program_mps_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarters, "control_program", lambda: None)
    with quarters.mps() as reason:
        assert reason == "nvidia-cuda-mps-control was not found"


# --- one process and four streams ----------------------------------------------------------------------------


def test_actions_are_queued_after_what_they_use() -> None:
    rows = one_forward_one_backward(4, 8).ranks
    queued = list(four_streams.queue_order(rows))
    place = {four_streams.result(action): number for number, action in enumerate(queued)}
    assert sorted(queued) == sorted(action for row in rows for action in row)
    for number, action in enumerate(queued):
        needed = four_streams.needed(action, 4)
        assert needed is None or place[needed] < number
    assert [action for action in queued if action.stage == 2] == list(rows[2])


def test_a_backward_is_split_into_its_halves() -> None:
    assert four_streams.split([[Action.parse("0F0"), Action.parse("0B0")]]) == [
        [Action.parse(text) for text in ("0F0", "0I0", "0W0")]
    ]


def test_four_streams_compute_the_same_gradients_in_every_order() -> None:
    torch.manual_seed(0)
    checks = {check.name: check.value for check in four_streams.run(TINY)}
    same = [value for name, value in checks.items() if name.endswith("to the bit")]
    assert same == [1.0] * len(four_streams.EXTRA)
    assert all(value > 0 for value in checks.values())
