"""The gradients that reach the optimizers are the mean over microbatches of (mask x full gradient)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from low_rank import masked_names
from torch_ranks import BLOCKS, SCHEDULES, Case, Layers, batch, loss_fn, plain, pool, train

from tf_adapters.testing import masked_gradients, relative_error

pytestmark = pytest.mark.distributed

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
PLANS = (
    0.5,
    {"0.1": 1.0, "0.2": 1.0, "1": 0.5, "2": 0.7, "3": 0.5},  # stage 0 frozen whole for two microbatches
    {"0": 1.0, "1": 0.8},  # stage 0 frozen all step
    {"0": 0.5, "1": 1.0, "2": 0.3, "3": 1.0},  # the last stage of two or of four frozen all step
    1.0,
)
EVERY_BLOCK = range(1, BLOCKS + 1)
REPLICATED = {
    "ddp": Case(replicas="ddp"),
    "ddp interleaved": Case(replicas="ddp", schedule="ScheduleInterleaved1F1B"),
    "ddp gradients as views": Case(replicas="ddp view"),
    "tp": Case(replicas="tp"),
    "tp zbv": Case(replicas="tp", schedule="ScheduleZBVZeroBubble"),
    "tp gpipe": Case(replicas="tp", schedule="ScheduleGPipe"),
    "tp looped": Case(replicas="tp", schedule="ScheduleLoopedBFS"),
    "tp interleaved": Case(replicas="tp", schedule="ScheduleInterleaved1F1B"),
    "tp zero bubble": Case(replicas="tp", schedule="ScheduleInterleavedZeroBubble"),
    "tp dualpipev": Case(replicas="tp", schedule="ScheduleDualPipeV"),
    "fsdp gpipe": Case(replicas="fsdp", schedule="ScheduleGPipe"),
    "fsdp 1f1b, parts too": Case(replicas="fsdp nested"),
    "fsdp 1f1b, resharded": Case(replicas="fsdp whole"),
    "fsdp looped, parts too": Case(replicas="fsdp nested", schedule="ScheduleLoopedBFS"),
    "fsdp interleaved": Case(replicas="fsdp", schedule="ScheduleInterleaved1F1B"),
    "fsdp zero bubble": Case(replicas="fsdp", schedule="ScheduleInterleavedZeroBubble"),
    "fsdp zbv, parts too, kept": Case(replicas="fsdp kept", schedule="ScheduleZBVZeroBubble"),
    "fsdp dualpipev": Case(replicas="fsdp", schedule="ScheduleDualPipeV"),
    "fsdp offloaded": Case(replicas="fsdp offloaded"),
    "replicate": Case(replicas="replicate"),
    "replicate interleaved": Case(replicas="replicate", schedule="ScheduleInterleaved1F1B"),
    "replicate zbv": Case(replicas="replicate", schedule="ScheduleZBVZeroBubble"),
}
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
    case = Case(schedule=schedule, ranks=ranks, ratios=PLANS, steps=len(PLANS))
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


def check_oracle(case: Case, ranks: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    for number in range(case.steps):
        actual = gathered([rank["steps"][number]["gradients"] for rank in ranks])
        expected = expected_gradients(case, ranks, number)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            if gradient.norm() == 0:
                assert actual[name].abs().max() == 0, f"step {number}: {name} is frozen but has a gradient"
            else:
                error = relative_error(actual[name], gradient)
                assert error <= tolerance, f"step {number}: {name} is off by {error:.1e}"
        assert all(rank["steps"][number]["still_trained"] == rank["steps"][number]["trained"] for rank in ranks)


def gathered(of_ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All stages' gradients by name. Replicas hold the same."""
    everything: dict[str, torch.Tensor] = {}
    for gradients in of_ranks:
        for name, gradient in gradients.items():
            assert torch.equal(everything.setdefault(name, gradient), gradient), f"{name} differs between replicas"
    return everything


def expected_gradients(case: Case, ranks: list[dict[str, Any]], number: int) -> dict[str, torch.Tensor]:
    ordinary = Layers(adapted=case.adapted).to(case.dtype)
    ordinary.load_state_dict(gathered([rank["steps"][number]["before"] for rank in ranks]))
    masks = ranks[0]["steps"][number]["masks"]

    def frozen(microbatch: int) -> set[str]:
        return {name for (_, m), names in masks.items() if m == microbatch for name in names}

    def scales(replica: int, microbatch: int) -> dict[str, torch.Tensor]:
        drawn = {}
        for rank in ranks:
            for (step, _, m), of_action in rank.get("draws", {}).items():
                if (rank["replica"], step, m) == (replica, rank["steps"][number]["number"], microbatch):
                    drawn |= {plain(name): of_weight for name, of_weight in of_action.items()}
        return drawn

    totals: dict[str, torch.Tensor] = {}
    scale = (case.section or {}).get("gradient_scale", "skipped_as_zero")
    replicas = sorted({rank["replica"] for rank in ranks})
    for replica in replicas:
        for part in range(case.batches):
            tensors = batch(case, number, replica, part)
            microbatches = zip(*(tensor.chunk(case.microbatches) for tensor in tensors), strict=True)
            drawn = partial(scales, replica)
            for name, gradient in masked_gradients(ordinary, microbatches, loss_fn, frozen, scale, drawn).items():
                totals[name] = totals.get(name, 0) + gradient / (len(replicas) * case.batches)
    return totals
