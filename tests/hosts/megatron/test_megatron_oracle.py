"""The gradients that reach Megatron's optimizer are the mean over microbatches of (mask x full gradient)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from low_rank import masked_names
from megatron_oracle import (
    ALL_STEP,
    BF16,
    BF16_OPTIMIZER,
    FOUR_RANKS,
    FP16,
    FP16_OPTIMIZER,
    FULL,
    FUSED,
    GATHER,
    GATHER_OPTIMIZER,
    MOE,
    OVERLAP,
    SELECTIVE,
    SHARDED,
    STAGE_0,
    TWO_RANKS,
    check_oracle,
    shortened,
)
from megatron_ranks import Case, Trained, train

pytestmark = pytest.mark.distributed


MTP = {"mtp_num_layers": 1}
FURTHER_TOKENS = {
    "1f1b": Case(ratios=0.5, model=MTP),
    "two depths, interleaved": Case(vp=2, ratios=0.6, model={"mtp_num_layers": 2}),
    "no pipelining": Case(pp=1, layers=2, ratios=0.5, model=MTP),
    "stage 0 frozen all step": Case(ratios=ALL_STEP, model=MTP),
    "everything frozen": Case(ratios=1.0, model=MTP),
    "tied": Case(tied=True, ratios=0.7, model=MTP),
    "tied, stage 0 frozen all step": Case(tied=True, ratios=ALL_STEP, model=MTP),
    "tied, no pipelining": Case(tied=True, pp=1, layers=2, ratios=0.5, model=MTP),
    "full recompute": Case(ratios=0.7, model={**MTP, **FULL}),
    "full recompute, stage 0 frozen whole": Case(ratios=STAGE_0, model={**MTP, **FULL}),
    "selective recompute": Case(ratios=0.7, model={**MTP, **SELECTIVE}),
    "fused gradients": Case(ratios=0.5, model={**MTP, **FUSED}),
    "bf16": Case(ratios=0.5, model={**MTP, **BF16}, optimizer=BF16_OPTIMIZER),
    "fp16 with loss scale": Case(ratios=0.5, model={**MTP, **FP16}, optimizer=FP16_OPTIMIZER),
    "distributed optimizer, clipping": Case(
        ratios=0.5, model=MTP, ddp=SHARDED, optimizer={**SHARDED, "clip_grad": 0.1}
    ),
    "replicas, overlap": Case(pp=1, layers=2, ratios=0.5, model=MTP, ddp=OVERLAP),
    "replicas, gather": Case(pp=1, layers=2, ratios=0.8, model=MTP, ddp=GATHER, optimizer=GATHER_OPTIMIZER),
    "tensor parallel": Case(pp=1, tp=2, layers=2, ratios=0.5, model=MTP),
    "sequence parallel": Case(pp=1, tp=2, layers=2, ratios=0.5, model={**MTP, "sequence_parallel": True}),
    "experts": Case(ratios=0.5, model={**MTP, **MOE}),
}


EVERY_LAYER = Trained(range(1, 5))
NOT_ON_STAGE_0, NOT_ON_STAGE_1 = Trained(range(3, 5)), Trained(range(1, 3))
PARTLY_FROZEN = {
    "interleaved": Case(vp=2, trained=EVERY_LAYER, ratios=0.5),
    "stage 0 frozen whole": Case(trained=EVERY_LAYER, ratios=STAGE_0),
    "tied": Case(tied=True, trained=EVERY_LAYER, ratios=0.5),
    "full recompute": Case(trained=EVERY_LAYER, ratios={"0B1": 0.5, "0B2": 1.0, "1B0": 0.7}, model=FULL),
    "bf16": Case(trained=EVERY_LAYER, ratios=0.5, model=BF16, optimizer=BF16_OPTIMIZER),
    "tensor parallel": Case(pp=1, tp=2, layers=2, trained=EVERY_LAYER, ratios=0.5),
    "replicas, overlap": Case(pp=1, layers=2, trained=EVERY_LAYER, ratios=0.5, ddp=OVERLAP),
    "replicas, gather": Case(pp=1, layers=2, trained=EVERY_LAYER, ratios=0.5, ddp=GATHER, optimizer=GATHER_OPTIMIZER),
    "nothing to train on stage 0": Case(trained=NOT_ON_STAGE_0, ratios=0.5),
    "nothing to train on stage 0, full recompute": Case(trained=NOT_ON_STAGE_0, ratios=0.5, model=FULL),
    "nothing to train on stage 0, distributed optimizer": Case(
        trained=NOT_ON_STAGE_0, ratios=0.5, ddp=SHARDED, optimizer=SHARDED
    ),
    "nothing to train on stage 1": Case(trained=NOT_ON_STAGE_1, ratios=0.5),
    "biases alone": Case(trained=Trained(range(1, 5), names="bias"), ratios=0.5),
}


@pytest.mark.parametrize("name", PARTLY_FROZEN)
def test_what_the_user_froze_stays_and_adapters_train(megatron, name):
    case = shortened(PARTLY_FROZEN[name])
    check_partly_frozen(case, megatron(2).run(train, case))


def test_a_run_with_a_stage_that_trains_nothing_is_monitored_and_planned_as_any_other(megatron):
    case = Case(trained=NOT_ON_STAGE_0, steps=7)
    ranks = megatron(2).run(train, case)
    check_partly_frozen(case, ranks)
    assert ranks[0]["steps"][-1]["phase"] == "stable"


def test_every_other_stage_may_train_nothing(megatron):
    case = Case(pp=4, microbatches=6, trained=Trained(range(1, 5, 2)), ratios=0.6, steps=2)
    check_partly_frozen(case, megatron(4).run(train, case))


def test_megatron_alone_gives_no_gradient_to_a_bias_whose_weight_is_frozen_and_that_the_layer_adds(megatron):
    """What the guide says of the host: were it otherwise, the weight and its bias need not be one unit."""
    case = Case(trained=Trained(range(1, 5), names="bias"), section=None, steps=1)
    step = megatron(2).run(train, case, False)[0]["steps"][0]
    still = {name for (stage, name), value in step["after"].items() if torch.equal(value, step["before"][stage, name])}
    assert {name for name in still if "bias" in name} == {
        f"decoder.layers.{layer}.self_attention.linear_qkv.bias" for layer in (0, 1)
    }


def check_partly_frozen(case: Case, ranks: list[dict]) -> None:
    check_oracle(case, ranks)
    moved = set()
    for rank in ranks:
        assert rank["status"] is None
        masked = masked_names(rank)
        assert masked
        assert all(case.trained.names in name for name in masked)
        for step in rank["steps"]:
            moved |= {name for (s, name), v in step["after"].items() if not torch.equal(v, step["before"][s, name])}
    assert moved
    assert all(case.trained.names in name for name in moved)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_masked_gradients_reach_the_optimizer(megatron, name):
    check_oracle(TWO_RANKS[name], megatron(2).run(train, TWO_RANKS[name]))


@pytest.mark.parametrize("name", FURTHER_TOKENS)
def test_masked_gradients_of_a_model_that_predicts_further_tokens(megatron, name):
    case = shortened(FURTHER_TOKENS[name])
    check_oracle(case, megatron(2).run(train, case))


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_masked_gradients_reach_the_optimizer_on_four_ranks(megatron, name):
    ranks = megatron(4).run(train, FOUR_RANKS[name])
    check_oracle(FOUR_RANKS[name], ranks)
    for rank in ranks:
        for step, other in zip(rank["steps"], ranks[0]["steps"], strict=True):
            assert step["masks"] == other["masks"]


MEANS = {"gradient_scale": "computed_mean"}
SCALED = {
    "interleaved": Case(vp=2, ratios=0.6),
    "tied": Case(tied=True, ratios=0.7),
    "replicas, overlap": Case(pp=1, layers=2, ratios=0.6, ddp=OVERLAP),
    "replicas, gather": Case(pp=1, layers=2, ratios=0.6, ddp=GATHER, optimizer=GATHER_OPTIMIZER),
    "fused gradients": Case(ratios=0.3, model=FUSED),
    "bf16, sequence parallel": Case(
        pp=1, tp=2, layers=2, ratios=0.6, model={**BF16, "sequence_parallel": True}, optimizer=BF16_OPTIMIZER
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_gradients_that_are_means_over_what_was_computed(megatron, name):
    case = replace(shortened(SCALED[name]), section=MEANS)
    check_oracle(case, megatron(2).run(train, case))


def test_the_oracle_can_fail(megatron):
    case = Case(ratios=0.5, steps=1)
    ranks = megatron(2).run(train, case)
    for rank in ranks:
        masks = rank["steps"][0]["masks"]
        rank["steps"][0]["masks"] = {(s, m): masks[s, (m + 1) % 4] for s, m in masks}
    with pytest.raises(AssertionError):
        check_oracle(case, ranks)
