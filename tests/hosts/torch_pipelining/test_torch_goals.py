"""What a goal takes where torch's pipeline cannot run what it would choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from logged import Lines
from torch_ranks import Case, attached, pool, values

from tf_adapters.errors import UnsupportedError
from tf_adapters.hosts.support import refuse
from tf_adapters.torch_pipelining import entry

pytestmark = pytest.mark.distributed

PHASES = {"warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 1}
EXACT = {**PHASES, "goal": "exact", "max_freeze_ratio": 0.0}


def trained(case: Case) -> dict[str, Any]:
    with Lines() as log:
        run = attached(case)
        losses = [run.train_step(step) for step in range(9)]
        result: dict[str, Any] = {"losses": losses, "parameters": values(run), "log": log.seen}
        if run.adapter is not None:
            config, state = run.adapter.config, run.adapter.controller.state
            result["settings"] = (config.goal, config.max_freeze_ratio, config.granularity, config.weight_gradients)
            result["failure"] = state.failure
            run.adapter.detach()
        return result


def replaced(rank: dict[str, Any]) -> list[str]:
    return [line for line in rank["log"] if "goal exact takes" in line]


LEFT = Case(schedule="ScheduleZBVZeroBubble", replicas="fsdp mixed")


def test_sums_that_depend_on_the_order_leave_weight_gradients_in_the_backward(tmp_path):
    found = pool(4).run(trained, replace(LEFT, section=EXACT, output_dir=str(tmp_path)))
    alone = pool(4).run(trained, replace(LEFT, section=None))
    [line] = replaced(found[0])
    assert 'takes weight_gradients "in_place" here: rank 0: stage 0 has fully_shard' in line
    assert not any(map(replaced, found[1:]))
    assert any("the same bits as without, and nothing is deferred" in line for line in found[0]["log"])
    for ours, theirs in zip(found, alone, strict=True):
        assert ours["settings"] == ("exact", 0.0, "tensor", "in_place")
        assert ours["failure"] is None
        assert ours["losses"] == theirs["losses"]
        assert all((ours["parameters"][name] == value).all() for name, value in theirs["parameters"].items())


def test_what_the_user_has_set_is_refused_and_not_replaced():
    for line in pool(4).run(refused, replace(LEFT, section={**PHASES, "weight_gradients": "deferred"})):
        assert "their sums depend on its order; use" in line


def refused(case: Case) -> str:
    try:
        attached(case)
    except UnsupportedError as error:
        return str(error)
    return ""


def refused_on_one_rank(case: Case) -> dict[str, Any]:
    def check(_: Any, advice: str) -> None:
        refuse(f"rank 1 cannot; use {advice}" if dist.get_rank() == 1 else None)

    with mock.patch.object(entry, "check_split_backwards", check):
        return trained(case)


def test_all_ranks_take_what_the_last_of_them_can_run(tmp_path):
    found = pool(2).run(refused_on_one_rank, Case(section=EXACT, output_dir=str(tmp_path)))
    assert [rank["settings"] for rank in found] == [("exact", 0.0, "tensor", "in_place")] * 2
    assert all(rank["failure"] is None for rank in found)
    [line] = replaced(found[0])
    assert "here: rank 1: rank 1 cannot; use" in line
