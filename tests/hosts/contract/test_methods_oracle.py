"""APF, AutoFreeze and the hybrids against the oracles, under each host's schedules and optimizers.

The contract has every method on one schedule; here each schedule, optimizer and way of parallelism has one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed_oracle
import deepspeed_ranks
import megatron_oracle
import megatron_ranks
import pytest
import torch_oracle
import torch_ranks
from deepspeed_oracle import BF16, HAS_DUALPIPEV, REENTRANT, ZERO1
from megatron_oracle import BF16 as BF16_MODEL
from megatron_oracle import BF16_OPTIMIZER, FULL, GATHER, GATHER_OPTIMIZER, MOE, OVERLAP, SHARDED

pytestmark = pytest.mark.distributed


def section(method: str, **settings: Any) -> dict[str, Any]:
    """A metric that soon finds much of a small model stable."""
    checks = {"stability_check_interval": 1, "apf_threshold": 0.4, "autofreeze_percentile": 90.0}
    return {**checks, "method": method, **settings}


def plan_of(method: str) -> dict[str, Any]:
    """A plan to start with, where there is one to make; a metric alone freezes only after monitoring."""
    return {"ratios": 0.6, "steps": 4} if method.startswith("timely") else {"steps": 7}


def check_masks(ranks: list[dict[str, Any]]) -> None:
    """The same on all ranks, something is frozen, and something is found stable: masks change with it."""
    for rank in ranks:
        assert [step["masks"] for step in rank["steps"]] == [step["masks"] for step in ranks[0]["steps"]]
    assert any(names for step in ranks[0]["steps"] for names in step["masks"].values())


# --- torch.distributed.pipelining ----------------------------------------------------------------------------

TORCH = {
    "gpipe": (torch_ranks.Case(schedule="ScheduleGPipe"), "autofreeze"),
    "looped": (torch_ranks.Case(schedule="ScheduleLoopedBFS"), "timely+apf"),
    "interleaved": (torch_ranks.Case(schedule="ScheduleInterleaved1F1B"), "autofreeze"),
    "zero bubble": (torch_ranks.Case(schedule="ScheduleInterleavedZeroBubble"), "timely+autofreeze"),
    "zbv": (torch_ranks.Case(schedule="ScheduleZBVZeroBubble"), "timely+apf"),
    "zbv alone": (torch_ranks.Case(schedule="ScheduleZBVZeroBubble"), "autofreeze"),
    "dualpipev": (torch_ranks.Case(schedule="ScheduleDualPipeV"), "apf"),
    "zbv, fsdp": (torch_ranks.Case(schedule="ScheduleZBVZeroBubble", replicas="fsdp kept"), "autofreeze"),
    "1f1b, ddp": (torch_ranks.Case(replicas="ddp"), "apf"),
    "1f1b, tp": (torch_ranks.Case(replicas="tp"), "timely+autofreeze"),
}


@pytest.mark.parametrize("name", TORCH)
def test_torch(name: str) -> None:
    template, method = TORCH[name]
    case = replace(template, section=section(method), **plan_of(method))
    ranks = torch_ranks.pool(4 if case.replicas else 2).run(torch_ranks.train, case)
    torch_oracle.check_oracle(case, ranks)
    check_masks(ranks)


# --- DeepSpeed -----------------------------------------------------------------------------------------------

DEEPSPEED = {
    "zero1": ({"config": ZERO1}, "timely+autofreeze"),
    "bf16": ({"config": {**BF16, **ZERO1}}, "apf"),
    "tied": ({"tied": True}, "autofreeze"),
    "tied bf16": ({"tied": True, "config": {**BF16, **ZERO1}}, "timely+apf"),
    "reentrant": ({"config": {**REENTRANT, **ZERO1}}, "autofreeze"),
    "gpipe": ({}, "timely+apf"),
    "dualpipev": ({"dualpipev": True}, "autofreeze"),
    "dualpipev zero1": ({"dualpipev": True, "config": ZERO1}, "timely+apf"),
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed(pools: Any, name: str) -> None:
    settings, method = DEEPSPEED[name]
    if "dualpipev" in name and not HAS_DUALPIPEV:
        pytest.skip("this DeepSpeed has no DualPipeV engine")
    if "pipeline" in settings.get("config", {}) and not deepspeed_oracle.CHECKPOINTS_ON_CPU:
        pytest.skip("activation checkpointing needs a device in this DeepSpeed, with or without us")
    chosen = section(method, schedule="gpipe" if name == "gpipe" else "host")
    case = deepspeed_ranks.Case(**settings, section=chosen, **plan_of(method))
    ranks = pools(2).run(deepspeed_ranks.train, case)
    deepspeed_oracle.check_oracle(case, ranks)
    check_masks(ranks)


# --- Megatron-Core -------------------------------------------------------------------------------------------

MEGATRON: dict[str, tuple[dict[str, Any], str]] = {
    "interleaved": ({"vp": 2}, "timely+apf"),
    "interleaved, full recompute": ({"vp": 2, "model": FULL}, "autofreeze"),
    "tied": ({"tied": True}, "autofreeze"),
    "bf16": ({"model": BF16_MODEL, "optimizer": BF16_OPTIMIZER}, "apf"),
    "distributed optimizer": ({"ddp": SHARDED, "optimizer": SHARDED}, "timely+autofreeze"),
    "no pipelining, replicas, overlap": ({"pp": 1, "layers": 2, "ddp": OVERLAP}, "apf"),
    "no pipelining, replicas, gather": (
        {"pp": 1, "layers": 2, "ddp": GATHER, "optimizer": GATHER_OPTIMIZER},
        "autofreeze",
    ),
    "no pipelining, tensor parallel": ({"pp": 1, "tp": 2, "layers": 2}, "timely+apf"),
    "no pipelining, expert parallel": ({"pp": 1, "ep": 2, "layers": 2, "model": MOE}, "timely+apf"),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron(megatron: Any, name: str) -> None:
    settings, method = MEGATRON[name]
    case = megatron_ranks.Case(**settings, section=section(method), **plan_of(method))
    ranks = megatron(2).run(megatron_ranks.train, case)
    megatron_oracle.check_oracle(case, ranks)
    check_masks(ranks)
