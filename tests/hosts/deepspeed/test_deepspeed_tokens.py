"""Weight gradients from sampled tokens on DeepSpeed's engine: exactly what the draws say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from deepspeed_oracle import CASES, CHECKPOINTS_ON_CPU, REPLICATED, check_oracle
from deepspeed_ranks import train
from run_checks import assert_same, assert_tokens_drawn

pytestmark = pytest.mark.distributed

IN_PLACE = ["fp32", "gpipe zero1", "clipping", "tied zero1", "reentrant zero1", "bf16", "bf16 immediate", "one stage"]
DEFERRED = ["zero1", "gpipe bf16", "tied", "non-reentrant bf16", "bf16 zero0", "stage 0 frozen whole"]


def sampled(case, **section):
    return replace(case, section={**case.section, "granularity": "token", **section})


def check(case, ranks):
    check_oracle(case, ranks)
    assert_tokens_drawn(ranks)


@pytest.mark.parametrize("name", IN_PLACE)
def test_gradients_are_those_of_the_drawn_tokens(pools, name):
    case = sampled(CASES[name])
    if "pipeline" in case.config and not CHECKPOINTS_ON_CPU:
        pytest.skip("activation checkpointing needs a device in this DeepSpeed, with or without us")
    check(case, pools(case.stages).run(train, case))


@pytest.mark.parametrize("name", DEFERRED)
def test_gradients_are_those_of_the_drawn_tokens_where_they_wait(pools, name):
    case = sampled(CASES[name], weight_gradients="deferred")
    if "pipeline" in case.config and not CHECKPOINTS_ON_CPU:
        pytest.skip("activation checkpointing needs a device in this DeepSpeed, with or without us")
    check(case, pools(case.stages).run(train, case))


@pytest.mark.parametrize("name", ["fp32", "zero1", "bf16"])
def test_each_replica_draws_from_its_own_tokens(pools, name):
    case = sampled(REPLICATED[name])
    ranks = pools(4).run(train, case)
    check(case, ranks)
    one, other = (next(r["draws"] for r in ranks if (r["stage"], r["replica"]) == (0, n)) for n in (0, 1))
    assert one.keys() == other.keys()
    assert any(not torch.equal(one[key][name].scales, other[key][name].scales) for key in one for name in one[key])


def test_a_ratio_of_zero_is_the_host_to_the_bit(pools):
    case = replace(CASES["fp32"], ratios=0.0, steps=3)
    ours = pools(case.stages).run(train, sampled(case))
    alone = pools(case.stages).run(
        train, replace(case, section={**case.section, "method": "none", "max_freeze_ratio": 0.0}, ratios=None)
    )
    assert_same(ours, alone)
