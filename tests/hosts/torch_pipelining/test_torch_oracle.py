"""The gradients that reach the optimizers are the mean over microbatches of (mask x full gradient)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from low_rank import masked_names
from torch_oracle import PLANS, REPLICATED, check_oracle
from torch_ranks import BLOCKS, SCHEDULES, Case, pool, train

pytestmark = pytest.mark.distributed

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
EVERY_BLOCK = range(1, BLOCKS + 1)
PARTLY_FROZEN = {
    "1f1b": Case(adapted=EVERY_BLOCK),
    "1f1b, nothing to train on stage 0": Case(adapted=range(5, 9)),
    "1f1b, nothing to train on stage 1": Case(adapted=range(1, 5)),
    "interleaved, nothing to train on stage 0": Case(schedule="ScheduleInterleaved1F1B", adapted=range(3, 9)),
    "zero bubble": Case(schedule="ScheduleInterleavedZeroBubble", adapted=EVERY_BLOCK),
    "zbv": Case(schedule="ScheduleZBVZeroBubble", adapted=EVERY_BLOCK),
    "zbv, nothing to train on stage 1": Case(schedule="ScheduleZBVZeroBubble", adapted=range(1, 3)),
    "1f1b, checkpointing": Case(adapted=EVERY_BLOCK, checkpoint=True),
}
PARTLY_FROZEN_ON_FOUR = {
    "ddp": Case(replicas="ddp", adapted=EVERY_BLOCK),
    "every other of four stages trains nothing": Case(ranks=4, adapted=range(1, BLOCKS + 1, 5)),
    "fsdp, parts too": Case(replicas="fsdp nested", adapted=EVERY_BLOCK),
}
EVALUATED = {
    "1f1b": Case(),
    "1f1b, two batches": Case(batches=2),
    "zero bubble": Case(schedule="ScheduleInterleavedZeroBubble"),
    "ddp": Case(replicas="ddp"),
    "fsdp": Case(replicas="fsdp nested"),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str, ranks: int) -> None:
    case = Case(schedule=schedule, ranks=ranks, microbatches=2 * ranks, ratios=PLANS, steps=len(PLANS))
    check_oracle(case, pool(ranks).run(train, case))


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_activation_checkpointing(schedule: str) -> None:
    case = Case(schedule=schedule, ratios=0.7, checkpoint=True)
    check_oracle(case, pool(2).run(train, case))


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_stages_that_torch_traced(schedule: str) -> None:
    case = Case(schedule=schedule, ratios=PLANS, steps=len(PLANS), traced=True)
    check_oracle(case, pool(2).run(train, case))


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision(dtype: torch.dtype, schedule: str) -> None:
    case = Case(schedule=schedule, ratios=PLANS, steps=len(PLANS), dtype=dtype, optimizer="SGD")
    check_oracle(case, pool(2).run(train, case), tolerance=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_batches_that_accumulate_share_the_steps_masks(schedule: str) -> None:
    case = Case(schedule=schedule, ratios=PLANS, batches=3)
    check_oracle(case, pool(2).run(train, case))


@pytest.mark.skipif(TORCH < (2, 14), reason="torch takes microbatches one by one from 2.14 on")
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_microbatches_given_one_by_one(schedule: str) -> None:
    case = Case(schedule=schedule, ratios=PLANS, split=True)
    check_oracle(case, pool(2).run(train, case))


@pytest.mark.skipif(TORCH < (2, 15), reason="torch can leave FSDP's gradients unreduced from 2.15 on")
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleLoopedBFS", "ScheduleZBVZeroBubble"])
def test_gradients_that_fsdp_reduces_in_the_last_batch_only(schedule: str) -> None:
    case = Case(schedule=schedule, ratios=PLANS, batches=3, replicas="fsdp", deferred=True)
    check_oracle(case, pool(4).run(train, case))


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_in_between(name: str) -> None:
    """Not with V-shaped schedules, where torch's own ``eval()`` fails, nor where it would divide gradients again."""
    case = replace(EVALUATED[name], ratios=PLANS, evaluate=True)
    ranks = pool(4 if case.replicas else 2).run(train, case)
    check_oracle(case, ranks)
    assert all(rank["failure"] is None for rank in ranks)


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas(name: str) -> None:
    case = replace(REPLICATED[name], ratios=PLANS, steps=len(PLANS))
    ranks = pool(4).run(train, case)
    check_oracle(case, ranks)
    for rank in ranks:
        assert [step["masks"] for step in rank["steps"]] == [step["masks"] for step in ranks[0]["steps"]]


@pytest.mark.parametrize("name", PARTLY_FROZEN)
def test_what_the_user_froze_stays_and_adapters_train(name: str) -> None:
    check_partly_frozen(PARTLY_FROZEN[name], 2)


@pytest.mark.parametrize("name", PARTLY_FROZEN_ON_FOUR)
def test_what_the_user_froze_stays_and_adapters_train_on_four_ranks(name: str) -> None:
    check_partly_frozen(PARTLY_FROZEN_ON_FOUR[name], 4)


def test_a_run_with_a_stage_that_trains_nothing_is_monitored_and_planned_as_any_other() -> None:
    case = Case(adapted=range(5, 9), section={"monitoring": "halves"}, steps=7)
    ranks = pool(2).run(train, case)
    check_oracle(case, ranks)
    assert [rank["failure"] for rank in ranks] == [None, None]
    assert ranks[0]["steps"][-1]["phase"] == "stable"
    step = next(step for step in ranks[1]["steps"] if step["phase"] == "monitoring_lower")
    assert {0 < len(step["masks"][1, m]) < len(step["trained"]) for m in range(case.microbatches)} == {True}


def check_partly_frozen(case: Case, size: int) -> None:
    case = replace(case, ratios=PLANS, steps=len(PLANS))
    ranks = pool(size).run(train, case)
    check_oracle(case, ranks)
    for rank in ranks:
        assert rank["failure"] is None
        masked = masked_names(rank)
        assert masked
        assert all("lora" in name for name in masked)
        for name, value in rank["parameters"].items():
            assert torch.equal(value, rank["steps"][0]["before"][name]) != ("lora" in name), name


MEANS = {"gradient_scale": "computed_mean"}
SCALED = {
    "1f1b, three batches": Case(batches=3),
    "zero bubble": Case(schedule="ScheduleInterleavedZeroBubble"),
    "ddp, two batches": Case(replicas="ddp", batches=2),
    "tp": Case(replicas="tp"),
    "fsdp zbv, two batches": Case(replicas="fsdp", schedule="ScheduleZBVZeroBubble", batches=2),
}


@pytest.mark.parametrize("name", SCALED)
def test_gradients_that_are_means_over_what_was_computed(name: str) -> None:
    case = replace(SCALED[name], section=MEANS, ratios=PLANS)
    check_oracle(case, pool(4 if case.replicas else 2).run(train, case))


def test_the_oracle_can_fail() -> None:
    case = Case(ratios=0.5, steps=1)
    ranks = pool(2).run(train, case)
    masks = ranks[0]["steps"][0]["masks"]
    ranks[0]["steps"][0]["masks"] = {(s, m): masks[s, (m + 1) % case.microbatches] for s, m in masks}
    with pytest.raises(AssertionError):
        check_oracle(case, ranks)
