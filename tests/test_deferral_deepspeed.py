"""Deferred weight gradients on DeepSpeed's engine: the same bits as the host alone, and the oracle's with masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from deepspeed_oracle import CASES, CHECKPOINTS_ON_CPU, REPLICATED, check_oracle
from deepspeed_ranks import train

pytestmark = pytest.mark.distributed


def deferred(case):
    return replace(case, section={**case.section, "weight_gradients": "deferred"})


@pytest.mark.parametrize("name", [name for name in CASES if name != "one stage"])
def test_masks_and_deferral_together(pools, name):
    case = deferred(CASES[name])
    if "pipeline" in case.config and not CHECKPOINTS_ON_CPU:
        pytest.skip("activation checkpointing needs a device in this DeepSpeed, with or without us")
    ranks = pools(case.stages).run(train, case)
    check_oracle(case, ranks)


@pytest.mark.parametrize("name", ["fp32", "zero1", "bf16", "tied"])
def test_masks_and_deferral_together_with_replicas(pools, name):
    case = deferred(REPLICATED[name])
    check_oracle(case, pools(4).run(train, case))


@pytest.mark.parametrize("name", ["fp32", "gpipe zero1", "bf16", "bf16 immediate", "tied zero1", "reentrant zero1"])
def test_nothing_frozen_is_the_host_to_the_bit(pools, name):
    case = replace(CASES[name], ratios=0.0, steps=3)
    ours = pools(case.stages).run(train, deferred(case))
    alone = pools(case.stages).run(
        train, replace(case, section={**case.section, "method": "none", "monitoring_masks": False}, ratios=None)
    )
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["plan"]["ranks"] != mine["schedule"]
        assert [step["loss"] for step in mine["steps"]] == [step["loss"] for step in theirs["steps"]]
        for weight, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][weight], value), weight
