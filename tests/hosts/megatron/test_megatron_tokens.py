"""Weight gradients from sampled tokens in Megatron's schedules: exactly what the draws say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_oracle import FOUR_RANKS, TWO_RANKS, check_oracle
from megatron_ranks import Case, train
from run_checks import assert_tokens_drawn

pytestmark = pytest.mark.distributed

CASES = {**TWO_RANKS, **FOUR_RANKS}
IN_PLACE = [
    *("1f1b", "interleaved", "clipping", "fused gradients", "tied", "full recompute", "selective recompute of mlp"),
    *("bf16", "distributed optimizer", "tensor parallel", "sequence parallel", "replicas, sharded, overlap"),
    *("replicas, gather", "experts", "expert parallel", "pipeline 2, sequence parallel 2"),
    *("pipeline 2, replicas 2, overlap", "interleaved, replicas 2, gather"),
]
DEFERRED = ["1f1b", "interleaved", "fused gradients", "full recompute", "sequence parallel", "experts", "pipeline 4"]


def sampled(case: Case, **section: str) -> Case:
    return replace(case, section={**(case.section or {}), "granularity": "token", **section})


def check(name: str, case: Case, ranks: list[dict]) -> None:
    check_oracle(case, ranks)
    assert_tokens_drawn(ranks)


@pytest.mark.parametrize("name", IN_PLACE)
def test_gradients_are_those_of_the_drawn_tokens(megatron, name):
    case = sampled(CASES[name])
    check(name, case, megatron(4 if name in FOUR_RANKS else 2).run(train, case))


@pytest.mark.parametrize("name", DEFERRED)
def test_gradients_are_those_of_the_drawn_tokens_where_they_wait(megatron, name):
    case = sampled(CASES[name], weight_gradients="deferred")
    check(name, case, megatron(4 if name in FOUR_RANKS else 2).run(train, case))


def test_a_ratio_of_zero_is_the_host_to_the_bit(megatron):
    case = replace(CASES["1f1b"], ratios=0.0, steps=3)
    ours = megatron(2).run(train, sampled(case))
    alone = megatron(2).run(train, replace(case, section=None, ratios=None))
    for mine, theirs in zip(ours, alone, strict=True):
        for own, host in zip(mine["steps"], theirs["steps"], strict=True):
            assert own["losses"] == host["losses"]
            for weight, value in host["after"].items():
                assert torch.equal(own["after"][weight], value), weight
