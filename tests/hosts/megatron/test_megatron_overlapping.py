"""Steps that overlap on Megatron-Core: the norm is late where nothing is clipped by it, and no bit changes.

Devices are emulated, so that four ranks on two cores wait for each other as on devices of their own. What the tests
compare has a margin of several actions.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from logged import Lines
from megatron_ranks import Case, innermost, run_batch, start, zero_gradients
from overlapping_steps import OVERLAPPING, assert_ranks_meet, assert_ranks_overlap

from tf_adapters.hosts.late import LateTensor
from tf_adapters.testing.emulated_device import EmulatedDevice

pytestmark = pytest.mark.distributed

RATE = 8e6
"""FLOP/s, at which a stage's forward takes about 5 ms."""

ALONE = Case(pp=4, layers=4, microbatches=8, section=None, steps=16)
CASE = replace(ALONE, section=OVERLAPPING)


def overlapping(case: Case) -> dict[str, Any]:
    """Train, and read losses and norms at the end."""
    with Lines() as log, EmulatedDevice(RATE) if case.section else EmulatedDevice(1e12):
        chunks, optimizer, adapter = start(case)
        losses, norms = [], []
        for step in range(case.steps):
            zero_gradients(chunks, optimizer)
            losses += run_batch(case, chunks, step, range(case.microbatches))
            norms.append(optimizer.step()[1])
        result: dict[str, Any] = {
            "late": [isinstance(norm, LateTensor) for norm in norms],
            "losses": [float(entry["loss"]) for entry in losses],
            "norms": [float(norm) for norm in norms],
            "log": log.seen,
        }
        if adapter is not None:
            state = adapter.controller.state
            result |= {"known": state.measurement, "plan": state.plan, "failure": state.failure}
            result["meetings"] = tuple(adapter.controller.pipeline.meetings)
            assert adapter.statistics_agree == result["late"][0]
            adapter.detach()
            assert not adapter.statistics_agree
        zero_gradients(chunks, optimizer)
        run_batch(case, chunks, 99, range(case.microbatches))
        result["after"] = isinstance(optimizer.step()[1], LateTensor)
        parameters = [parameter for chunk in chunks for parameter in innermost(chunk).parameters()]
        result["parameters"] = [parameter.detach().clone() for parameter in parameters]
    return result


def assert_same_bits(ours: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
        for own, hosts in zip(mine["parameters"], theirs["parameters"], strict=True):
            assert torch.equal(own, hosts)


def test_ranks_do_not_meet_without_clipping(megatron, tmp_path):
    ours = megatron(4).run(overlapping, replace(CASE, output_dir=str(tmp_path)))
    assert_same_bits(ours, megatron(4).run(overlapping, ALONE))
    for rank in ours:
        assert all(rank["late"])
        assert not rank["after"], "the norm is still late after detach()"
    assert_ranks_overlap(ours)


MEET = {
    "clipping": ({"clip_grad": 0.7}, False, "clip_grad 0.7"),
    "tied": ({}, True, "tied embeddings"),
}


@pytest.mark.parametrize("name", MEET)
def test_where_ranks_meet_the_log_says_what_makes_them_meet(megatron, tmp_path, name):
    optimizer, tied, reason = MEET[name]
    alone = replace(ALONE, optimizer=optimizer, tied=tied, steps=12)
    ours = megatron(4).run(overlapping, replace(alone, section=OVERLAPPING, output_dir=str(tmp_path)))
    assert_same_bits(ours, megatron(4).run(overlapping, alone))
    assert_ranks_meet(ours, reason)


_SHARDED = {"use_distributed_optimizer": True, "bf16": True, "params_dtype": torch.bfloat16}


@pytest.mark.parametrize("sharded", [False, True])
def test_the_late_norm_of_replicas_and_shards_is_the_hosts(megatron, tmp_path, sharded):
    """Two pipelines of two stages, whose optimizers have all gradients or each a shard of them."""
    alone = replace(ALONE, pp=2, steps=4)
    if sharded:
        alone = replace(
            alone,
            model={"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
            ddp={"use_distributed_optimizer": True},
            optimizer=_SHARDED,
        )
    ours = megatron(4).run(overlapping, replace(alone, section=OVERLAPPING, output_dir=str(tmp_path)))
    theirs = megatron(4).run(overlapping, alone)
    assert_same_bits(ours, theirs)
    assert all(all(rank["late"]) for rank in ours)
    assert not any(any(rank["late"]) for rank in theirs)


def reduced_by_the_loop(case: Case) -> list[Any]:
    """What a loop gets from its reductions, while we are attached and after, and how often all ranks took part."""
    import megatron_patches.reductions as reductions
    from megatron_patches.patch import revert_all
    from tf_adapters.megatron.late_norm import agreed_statistics

    loop = types.ModuleType("megatron.training.training")
    calls: list[Any] = []

    def reduce(name: str, value: Any) -> Any:
        calls.append(name)
        return value

    loop.logical_and_across_model_parallel_group = lambda input: reduce("successful", input)  # type: ignore[attr-defined]
    loop.reduce_max_stat_across_model_parallel_group = lambda stat: reduce("largest", stat)  # type: ignore[attr-defined]
    sys.modules["megatron.training.training"] = loop
    try:
        chunks, optimizer, adapter = start(case)
        agreed_statistics(reductions.MEGATRON_LM, lambda: adapter.statistics_agree)
        found = []
        for step in range(2):
            zero_gradients(chunks, optimizer)
            run_batch(case, chunks, step, range(case.microbatches))
            successful, norm, _ = optimizer.step()
            successful = loop.logical_and_across_model_parallel_group(successful)
            norm = loop.reduce_max_stat_across_model_parallel_group(norm)
            rate = loop.reduce_max_stat_across_model_parallel_group(0.1)
            found.append((successful, isinstance(norm, LateTensor), rate, len(calls)))
            adapter.detach()
    finally:
        revert_all(reductions.PATCHES)
        del sys.modules["megatron.training.training"]
    return found


def test_a_loop_reduces_no_statistic_that_all_ranks_have(megatron, tmp_path):
    case = replace(CASE, pp=2, output_dir=str(tmp_path))
    rounded = float(torch.tensor(0.1, dtype=torch.float32))
    for found in megatron(2).run(reduced_by_the_loop, case):
        assert found == [(True, True, rounded, 0), (True, False, 0.1, 3)]
