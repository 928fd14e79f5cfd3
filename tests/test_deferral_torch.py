"""Deferred weight gradients on torch's schedules: the same bits as the host alone, and the oracle's with masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_torch_oracle import PLANS, check_oracle
from torch_ranks import Case, pool, train

pytestmark = pytest.mark.distributed

DEFERRED = {"weight_gradients": "deferred"}
CASES = {
    "1f1b": Case(),
    "gpipe": Case(schedule="ScheduleGPipe"),
    "interleaved": Case(schedule="ScheduleInterleaved1F1B"),
    "looped": Case(schedule="ScheduleLoopedBFS"),
    "zero bubble": Case(schedule="ScheduleInterleavedZeroBubble"),
    "zbv": Case(schedule="ScheduleZBVZeroBubble"),
    "1f1b, checkpointing": Case(checkpoint=True),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_and_deferral_together(name: str) -> None:
    case = replace(CASES[name], section=DEFERRED, ratios=PLANS, steps=len(PLANS))
    ranks = pool(2).run(train, case)
    check_oracle(case, ranks)
    assert all(rank["failure"] is None for rank in ranks)


@pytest.mark.parametrize("name", CASES)
def test_nothing_frozen_is_the_host_to_the_bit(name: str) -> None:
    case = replace(CASES[name], section=DEFERRED, ratios=0.0, steps=3)
    ours = pool(2).run(train, case)
    alone = pool(2).run(train, replace(case, section=None, ratios=None))
    for mine, theirs in zip(ours, alone, strict=True):
        assert [step["loss"] for step in mine["steps"]] == [step["loss"] for step in theirs["steps"]]
        assert mine["plan"]["ranks"] != mine["schedule"]
        assert mine["failure"] is None
        for weight, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][weight], value), weight
