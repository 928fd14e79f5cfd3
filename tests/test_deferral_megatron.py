"""Deferred weight gradients in Megatron's schedules: the same bits as the host alone, and the oracle's with masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_ranks import Case, train
from test_megatron_oracle import FOUR_RANKS, TWO_RANKS, check_oracle

pytestmark = pytest.mark.distributed

CASES = {**TWO_RANKS, **FOUR_RANKS}
EXACT = [
    "1f1b",
    "interleaved",
    "fused gradients",
    "tied",
    "full recompute",
    "bf16",
    "distributed optimizer",
    "experts",
    "pipeline 2, sequence parallel 2",
    "pipeline 2, replicas 2, overlap",
]


def deferred(case: Case) -> Case:
    return replace(case, section={**(case.section or {}), "weight_gradients": "deferred"})


def ranks(name: str) -> int:
    return 4 if name in FOUR_RANKS else 2


@pytest.mark.parametrize("name", CASES)
def test_masks_and_deferral_together(megatron, name):
    case = deferred(CASES[name])
    check_oracle(case, megatron(ranks(name)).run(train, case))


@pytest.mark.parametrize("name", EXACT)
def test_nothing_frozen_is_the_host_to_the_bit(megatron, name):
    case = replace(CASES[name], ratios=0.0, steps=3)
    ours = megatron(ranks(name)).run(train, deferred(case))
    alone = megatron(ranks(name)).run(train, replace(case, section=None, ratios=None))
    for mine, theirs in zip(ours, alone, strict=True):
        for own, host in zip(mine["steps"], theirs["steps"], strict=True):
            assert own["losses"] == host["losses"]
            for weight, value in host["after"].items():
                assert torch.equal(own["after"][weight], value), weight
