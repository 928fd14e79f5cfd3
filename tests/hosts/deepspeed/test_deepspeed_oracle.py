"""The gradients that reach DeepSpeed's optimizer are the mean over microbatches of (mask x full gradient)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from deepspeed_oracle import (
    ALL_STEP,
    AUTOCAST,
    BF16,
    CASES,
    CHECKPOINTS_ON_CPU,
    HAS_DUALPIPEV,
    NON_REENTRANT,
    REENTRANT,
    REPLICATED,
    SKIP_STAGE_0,
    STEPS,
    ZERO1,
    check_oracle,
)
from deepspeed_ranks import Case, train
from low_rank import masked_names

pytestmark = pytest.mark.distributed


SKIP_V = {**{f"0B{m}": 1.0 for m in (1, 2)}, "0B0": 0.5, "2B1": 1.0, "3B3": 1.0, "1B2": 0.7}
DUALPIPEV = {
    "fp32": Case(dualpipev=True, ratios=0.5),
    "zero1": Case(dualpipev=True, config=ZERO1, ratios=0.5),
    "bf16": Case(dualpipev=True, config={**BF16, **ZERO1}, ratios=0.5),
    "clipping": Case(dualpipev=True, config={**ZERO1, "gradient_clipping": 0.1}, ratios=0.5),
    "autocast": Case(dualpipev=True, config=AUTOCAST, ratios=0.5),
    "six microbatches": Case(dualpipev=True, config={"gradient_accumulation_steps": 6}, ratios=0.6),
    "stage 0 frozen whole": Case(dualpipev=True, ratios=SKIP_V),
    "everything frozen": Case(dualpipev=True, ratios=1.0),
    "tied": Case(dualpipev=True, tied=True, ratios=0.8),
    "tied zero1": Case(dualpipev=True, tied=True, config=ZERO1, ratios=0.8),
    "reentrant": Case(dualpipev=True, config=REENTRANT, ratios=0.7),
    "non-reentrant zero1": Case(dualpipev=True, config={**NON_REENTRANT, **ZERO1}, ratios=0.7),
}
BLOCKS = range(1, 5)
PARTLY_FROZEN = {
    "zero1": Case(adapted=BLOCKS, config=ZERO1, ratios=0.5),
    "bf16": Case(adapted=BLOCKS, config={**BF16, **ZERO1}, ratios=0.5),
    "stage 0 frozen whole": Case(adapted=BLOCKS, ratios=SKIP_STAGE_0),
    "stage 0 frozen all step zero1": Case(adapted=BLOCKS, config=ZERO1, ratios=ALL_STEP),
    "tied bf16": Case(adapted=BLOCKS, tied=True, config={**BF16, **ZERO1}, ratios=0.5),
    "reentrant": Case(adapted=BLOCKS, config=REENTRANT, ratios=0.7),
    "nothing to train on stage 0": Case(adapted=range(3, 5), ratios=0.5),
    "nothing to train on stage 0, reentrant": Case(adapted=range(3, 5), config=REENTRANT, ratios=0.5),
    "nothing to train on stage 1": Case(adapted=range(1, 3), ratios=0.5),
    "nothing to train on stage 0, a whole life": Case(adapted=range(3, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_masked_gradients_reach_the_optimizer(pools, name):
    case = CASES[name]
    if "pipeline" in case.config and not CHECKPOINTS_ON_CPU:
        pytest.skip("activation checkpointing needs a device in this DeepSpeed, with or without us")
    check_oracle(case, pools(case.stages).run(train, case))


@pytest.mark.skipif(not HAS_DUALPIPEV, reason="this DeepSpeed has no DualPipeV engine")
@pytest.mark.parametrize("name", DUALPIPEV)
def test_masked_gradients_reach_the_optimizer_in_dualpipev(pools, name):
    case = replace(DUALPIPEV[name], steps=STEPS)
    check_oracle(case, pools(2).run(train, case))


@pytest.mark.skipif(not HAS_DUALPIPEV, reason="this DeepSpeed has no DualPipeV engine")
@pytest.mark.parametrize("config", [{}, ZERO1], ids=["fp32", "zero1"])
def test_masked_gradients_reach_the_optimizer_in_dualpipev_with_replicas(pools, config):
    case = Case(dualpipev=True, config=config, ratios=0.6, steps=STEPS)
    check_oracle(case, pools(4).run(train, case))


@pytest.mark.parametrize("name", REPLICATED)
def test_masked_gradients_reach_the_optimizer_with_replicas(pools, name):
    case = REPLICATED[name]
    ranks = pools(4).run(train, case)
    check_oracle(case, ranks)
    for rank in ranks:
        for step, other in zip(rank["steps"], ranks[0]["steps"], strict=True):
            assert step["masks"] == other["masks"]


@pytest.mark.parametrize("name", PARTLY_FROZEN)
def test_what_the_user_froze_stays_and_adapters_train(pools, name):
    case = replace(PARTLY_FROZEN[name], steps=6 if PARTLY_FROZEN[name].ratios is None else STEPS)
    if "pipeline" in case.config and not CHECKPOINTS_ON_CPU:
        pytest.skip("activation checkpointing needs a device in this DeepSpeed, with or without us")
    check_partly_frozen(case, pools(2).run(train, case))


def test_every_other_stage_may_train_nothing(pools):
    case = Case(stages=4, adapted=range(1, 5, 3), ratios=0.6, steps=STEPS)
    check_partly_frozen(case, pools(4).run(train, case))


def test_what_the_user_froze_stays_and_adapters_train_on_replicas(pools):
    case = Case(adapted=BLOCKS, config=ZERO1, ratios=0.8, steps=STEPS)
    check_partly_frozen(case, pools(4).run(train, case))


@pytest.mark.skipif(not HAS_DUALPIPEV, reason="this DeepSpeed has no DualPipeV engine")
@pytest.mark.parametrize("adapted", [BLOCKS, range(2, 5)], ids=["everywhere", "not on stage 0"])
def test_what_the_user_froze_stays_and_adapters_train_in_dualpipev(pools, adapted):
    case = Case(dualpipev=True, adapted=adapted, ratios=0.5, steps=STEPS)
    check_partly_frozen(case, pools(2).run(train, case))


def check_partly_frozen(case: Case, ranks: list[dict]) -> None:
    check_oracle(case, ranks)
    moved = set()
    for rank in ranks:
        assert rank["status"] is None
        masked = masked_names(rank)
        assert masked
        assert all("lora" in name for name in masked)
        before = rank["steps"][0]["before"]
        moved |= {name for name, value in rank["parameters"].items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora" in name for name in moved)


def test_four_stages(pools):
    case = Case(stages=4, config={"gradient_accumulation_steps": 6}, ratios=0.6, steps=STEPS)
    check_oracle(case, pools(4).run(train, case))


MEANS = {"gradient_scale": "computed_mean"}
SCALED = {
    "clipped": (2, Case(config={**ZERO1, "gradient_clipping": 0.1})),
    "tied": (2, Case(tied=True)),
    "bf16": (2, Case(config={**BF16, **ZERO1})),
    "bf16, tied": (2, Case(config={**BF16, **ZERO1}, tied=True)),
    "dualpipev": (2, Case(dualpipev=True)),
    "replicas": (4, Case()),
    "zero1, tied, replicas": (4, Case(config=ZERO1, tied=True)),
}


@pytest.mark.parametrize("name", SCALED)
def test_gradients_that_are_means_over_what_was_computed(pools, name):
    size, case = SCALED[name]
    if case.dualpipev and not HAS_DUALPIPEV:
        pytest.skip("this DeepSpeed has it not")
    case = replace(case, section=MEANS, ratios=0.6, steps=STEPS)
    check_oracle(case, pools(size).run(train, case))


def test_the_oracle_can_fail(pools):
    ranks = pools(2).run(train, Case(ratios=0.5, steps=1))
    shifted = {key: ranks[0]["steps"][0]["masks"][key[0], (key[1] + 1) % 4] for key in ranks[0]["steps"][0]["masks"]}
    for rank in ranks:
        rank["steps"][0]["masks"] = shifted
    with pytest.raises(AssertionError):
        check_oracle(Case(ratios=0.5, steps=1), ranks)
