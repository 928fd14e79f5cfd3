"""Stability checks of several real ranks over gloo: what they send, who keeps what, and what an error of one does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pools import fork_ranks

from tf_adapters import collectives as messages
from tf_adapters.collectives import ProcessGroupCollectives, RemoteError
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.selection import sampling
from tf_adapters.selection.sampling import ParameterPiece
from tf_adapters.selection.stability import StabilityChecks, StabilityState, without_evidence
from tf_adapters.testing import RankPool
from tf_adapters.testing.plans import tensor_units

pytestmark = pytest.mark.distributed

STAGES, REPLICAS, TENSORS = 2, 2, 48
NAMES = [f"layers.{n}.weight" for n in range(TENSORS)]
UNITS = {
    stage: tensor_units({name: torch.nn.Parameter(torch.ones(4)) for name in NAMES})  # type: ignore[arg-type]
    for stage in range(STAGES)
}
SETTINGS: dict[str, Any] = {
    "goal": "paper",
    "method": "timely+apf",
    "apf_threshold": 0.5,
    "stability_check_interval": 1,
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with fork_ranks(STAGES * REPLICAS) as started:
        yield started


class Model:
    """One rank's stage: odd tensors move steadily, even ones back and forth."""

    def __init__(self, stage: int, elements: int, parts: int = 1) -> None:
        generator = torch.Generator().manual_seed(stage)
        self.values = {name: torch.randn(elements, generator=generator) for name in NAMES}
        self.held = range(parts)
        self.parts = parts
        self.fails = False

    def __call__(self, stage: int, name: str) -> list[ParameterPiece]:
        if self.fails:
            raise RuntimeError("no such shard")
        shards = self.values[name].chunk(self.parts)
        return [ParameterPiece(shards[part], (part,) if self.parts > 1 else ()) for part in self.held]

    def train(self, step: int) -> None:
        for number, values in enumerate(self.values.values()):
            values.add_(0.1 if number % 2 or step % 2 else -0.1)


def on_rank(elements: int = 1000, parts: int = 1, **settings: Any) -> tuple[Model, ProcessGroupCollectives, Any]:
    """This rank's stage, the group, and its checks."""
    stage = dist.get_rank() % STAGES
    model, group = Model(stage, elements, parts), ProcessGroupCollectives()
    return model, group, StabilityChecks(TimelyFreezeConfig(**{**SETTINGS, **settings}), UNITS, [stage], model, group)


# --- what travels --------------------------------------------------------------------------------------------


class CountedMessages:
    """Our process group, with a count of the bytes that this rank hands over and is handed."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank
        self.sent = self.received = 0

    def gather(self, parts: Any, tensor: torch.Tensor, root: int) -> Any:
        self._count(tensor.nbytes * (self._rank != root), sum(part.nbytes for part in parts))
        return self._group.gather(parts, tensor, root)

    def scatter(self, tensor: torch.Tensor, parts: Any, root: int) -> Any:
        self._count(sum(part.nbytes for part in parts), tensor.nbytes)
        return self._group.scatter(tensor, parts, root)

    def allgather(self, parts: Any, tensor: torch.Tensor) -> Any:
        self._count(tensor.nbytes, sum(part.nbytes for part in parts))
        return self._group.allgather(parts, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        self._count(tensor.nbytes * (self._rank == root), tensor.nbytes * (self._rank != root))
        return self._group.broadcast(tensor, root)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        self._count(sum(tensor.nbytes for tensor in tensors), 0)
        return self._group.send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        self._count(0, sum(tensor.nbytes for tensor in tensors))
        return self._group.recv(tensors, source, tag)

    def _count(self, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received


@dataclass(frozen=True)
class Traffic:
    """Bytes of three checks: the first, which settles who reads, one like all that follow, and after a new sharding."""

    sent: tuple[int, int, int]
    received: tuple[int, int, int]


def traffic(parts: int = 1) -> Traffic:
    model, group, checks = on_rank(elements=40_000 * parts, parts=parts)
    if parts > 1:
        model.held = range(dist.get_rank() // STAGES, parts, REPLICAS)
    sent, received = [], []
    state = StabilityState()
    with closing(group):
        for step in range(3):
            own = group._group
            group._group = counted = CountedMessages(own, group.rank)
            try:
                state = checks.run(state, step, 0)
            finally:
                group._group = own
            sent.append(counted.sent)
            received.append(counted.received)
            if step == 1:
                model.parts, model.held = 3, range(3)
    return Traffic(tuple(sent), tuple(received))  # type: ignore[arg-type]


def test_one_replica_sends_64_kb_a_rank_and_the_other_a_few_hundred_bytes(pool: RankPool) -> None:
    first, second, *others = pool.run(traffic)
    assert first.received[1] < 64 * 1024  # what the other stage's rank sends, and a header of each rank
    assert 50 * 1024 < second.sent[1] < 64 * 1024
    assert all(max(rank.sent[:2]) < 512 for rank in others)
    assert second.sent[0] - second.sent[1] < 512  # who holds what, once
    assert all(rank.received[1] < 1024 for rank in (second, *others))
    assert all(rank.sent[2] < 512 for rank in others)


def test_shards_of_a_stage_send_64_kb_together(pool: RankPool) -> None:
    _, *ranks = pool.run(traffic, 4)
    of_stage = [rank.sent[1] for rank in ranks if rank is not ranks[1]]  # stage 1's, on ranks 1 and 3
    assert 50 * 1024 < sum(of_stage) < 65 * 1024
    assert min(of_stage) > 20 * 1024
    assert all(rank.received[1] < 1024 for rank in ranks)


# --- who keeps what ------------------------------------------------------------------------------------------


def checked(
    settings: Mapping[str, Any], steps: int, saved: Mapping[str, Any] | None = None, first: int = 0
) -> dict[str, Any]:
    """The state after some more steps of a run, saved as JSON."""
    model, group, checks = on_rank(**settings)
    for step in range(first):
        model.train(step)
    state = StabilityState.from_json(saved if saved is None or group.rank == 0 else without_evidence(saved))
    with closing(group):
        for step in range(first, first + steps):
            state = checks.run(state, step, 0)
            model.train(step)
    return json.loads(json.dumps(state.to_json()))


def test_the_first_rank_alone_keeps_what_checks_compare_with_and_all_find_the_same_stable(
    pool: RankPool,
) -> None:
    first, *others = pool.run(checked, {}, 5)
    assert first["checks"] == 4
    assert first["stable"] == {str(stage): list(range(0, TENSORS, 2)) for stage in range(STAGES)}
    assert first["snapshot"]["keys"] == [[stage, name, []] for stage in range(STAGES) for name in sorted(NAMES)]
    assert first["memory"]
    assert others == [without_evidence(first)] * 3
    assert len(json.dumps(others[0])) < 1000


@pytest.mark.parametrize("method", ["apf", "autofreeze", "timely+apf"])
def test_checks_go_on_from_a_saved_state_as_if_they_had_not_stopped(pool: RankPool, method: str) -> None:
    whole = pool.run(checked, {"method": method}, 8)
    (half, *_) = pool.run(checked, {"method": method}, 5)
    assert pool.run(checked, {"method": method}, 3, half, 5) == whole


def test_in_other_shards_the_model_is_only_read_and_what_is_stable_stays(pool: RankPool) -> None:
    before, *_ = pool.run(checked, {}, 5)
    after, *others = pool.run(checked, {"parts": 4}, 1, before, 5)
    assert (after["checks"], after["stable"]) == (before["checks"], before["stable"])
    assert after["memory"] == before["memory"]
    assert len(after["snapshot"]["keys"]) == 4 * len(before["snapshot"]["keys"])
    assert others == [without_evidence(after)] * 3


# --- what happens on one rank ----------------------------------------------------------------------------------


def one_rank_changes(change: str) -> tuple[list[Any], StabilityState]:
    """Two checks, one in which the last rank is not as it was, one more; what each raised, if anything."""
    model, group, checks = on_rank()
    state, raised = StabilityState(), []
    with closing(group):
        for step in range(5):
            if dist.get_rank() == STAGES * REPLICAS - 1:
                model.fails = change == "fails" and step == 2
                model.parts, model.held = (2, range(2)) if change == "shards" and step >= 2 else (1, range(1))
            try:
                state = checks.run(state, step, 0)
                raised.append(None)
            except RemoteError as error:
                raised.append(str(error))
            model.train(step)
    return raised, replace(state, memory={}, snapshot=None)


@pytest.mark.parametrize("step", [0, 2])
def test_an_error_on_one_rank_is_the_same_on_all_and_the_next_check_is_as_ever(pool: RankPool, step: int) -> None:
    if step == 0:
        outcomes = pool.run(fails_first)
        assert outcomes == [["rank 3: RuntimeError: no such shard", None]] * 4
        return
    outcomes = pool.run(one_rank_changes, "fails")
    assert [raised for raised, _ in outcomes] == [[None, None, "rank 3: RuntimeError: no such shard", None, None]] * 4
    assert [state.checks for _, state in outcomes] == [3] * 4


def fails_first() -> list[Any]:
    model, group, checks = on_rank()
    model.fails = dist.get_rank() == STAGES * REPLICAS - 1
    raised: list[Any] = []
    with closing(group):
        for _ in range(2):
            try:
                checks.run(StabilityState(), 0, 0)
                raised.append(None)
            except RemoteError as error:
                raised.append(str(error))
            model.fails = False
    return raised


def test_a_rank_that_holds_something_else_has_all_settle_anew_who_reads(pool: RankPool) -> None:
    outcomes = pool.run(one_rank_changes, "shards")
    assert [raised for raised, _ in outcomes] == [[None] * 5] * 4
    assert [state.checks for _, state in outcomes] == [3] * 4  # the third reads only
    assert len({json.dumps(state.to_json()) for _, state in outcomes}) == 1


def test_what_was_never_read_is_never_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    """More parameters on a rank than a reading has room for."""
    monkeypatch.setattr(sampling, "READING_BYTES", 240)
    names = [f"{n}.w" for n in range(30)]
    values = {name: torch.zeros(2) for name in names}
    units = {0: tensor_units({name: torch.nn.Parameter(torch.ones(2)) for name in names})}  # type: ignore[arg-type]
    for method in ("timely+apf", "autofreeze"):
        config = TimelyFreezeConfig(**{**SETTINGS, "method": method, "autofreeze_percentile": 50.0})
        held = lambda stage, name: [ParameterPiece(values[name])]  # noqa: E731
        checks = StabilityChecks(config, units, [0], held, messages.Collectives())
        state = StabilityState()
        for step in range(3):
            state = checks.run(state, step, 0)
        assert state.snapshot is not None
        read = {name for _, name, _ in state.snapshot.keys}
        assert len(read) == 20
        stable = {names[unit] for unit in state.stable[0]}
        assert stable == (read if "apf" in method else {"0.w", "1.w"})  # the third layer is not read
