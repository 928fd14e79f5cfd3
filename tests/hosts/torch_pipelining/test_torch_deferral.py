"""Deferred weight gradients on torch's schedules: the same bits as the host alone, and the oracle's with masks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_checks import assert_same
from torch_oracle import PLANS, REPLICATED, check_oracle
from torch_ranks import SCHEDULES, Case, attached, pool, train

from tf_adapters.schedule.deferral import most_in_flight
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.testing.ranks import RanksFailed

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


ALL = CASES | {name: case for name, case in REPLICATED.items() if name.startswith("ddp")}


@pytest.mark.parametrize("name", ALL)
def test_nothing_frozen_is_the_host_to_the_bit(name: str) -> None:
    case = replace(ALL[name], section=DEFERRED, ratios=0.0, steps=3)
    ranks = pool(4 if case.replicas else 2)
    ours = ranks.run(train, case)
    alone = ranks.run(train, replace(case, section=None, ratios=None))
    assert_same(ours, alone)
    for mine in ours:
        assert mine["plan"]["ranks"] != mine["schedule"] or "zb" in name or "zero" in name  # good already
        assert mine["failure"] is None


@pytest.mark.parametrize(("name", "kept"), [("1f1b", True), ("interleaved", False)])
def test_a_run_knows_the_sent_tensors_that_only_its_own_order_keeps(name: str, *, kept: bool) -> None:
    first, last = pool(2).run(train, replace(CASES[name], section=DEFERRED, ratios=0.0, steps=2))
    if not kept:
        assert first["sent_bytes"] == last["sent_bytes"] == {}  # the host's loop keeps them, too
        return
    size = first["sent_bytes"][0, Kind.FORWARD]
    assert size == last["sent_bytes"][1, Kind.BACKWARD] > 0
    assert sum(first["sent_bytes"].values()) == sum(last["sent_bytes"].values()) == size


@pytest.mark.parametrize(
    ("schedule", "fewer"),
    [
        ("Schedule1F1B", 2),
        ("ScheduleInterleaved1F1B", 4),
        ("ScheduleInterleavedZeroBubble", 4),
        ("ScheduleZBVZeroBubble", 4),
    ],
)
def test_with_less_memory_it_is_the_host_to_the_bit(schedule: str, fewer: int) -> None:
    case = Case(schedule=schedule, ranks=4, section={**DEFERRED, "extra_microbatches": -fewer}, ratios=0.0, steps=3)
    ours = pool(4).run(train, case)
    alone = pool(4).run(train, replace(case, section=None, ratios=None))
    assert_same(ours, alone)
    for mine in ours:
        assert mine["failure"] is None
        rows = mine["plan"]["ranks"], mine["schedule"]
        held, hosts = map(most_in_flight, map(PipelineSchedule.from_text, rows))
        assert held == hosts - fewer


def test_a_run_is_monitored_without_masks_and_then_planned(tmp_path: Path) -> None:
    section = {
        **DEFERRED,
        "monitoring_steps": 10,
        "max_freeze_ratio": 0.4,
        "replan_interval": 1,
        "replan_threshold": 0.0,
    }
    case = Case(ranks=4, section=section, steps=16, output_dir=str(tmp_path))
    ranks = pool(4).run(train, case)
    check_oracle(case, ranks)
    for rank in ranks:
        assert rank["failure"] is None
        assert rank["steps"][-1]["phase"] == "stable"
        monitored = [step for step in rank["steps"] if step["phase"].startswith("monitoring")]
        assert len(monitored) >= 2
        assert not any(names for step in monitored for names in step["masks"].values())
    plan = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())["plan"]
    assert {action[1] for row in plan["ranks"] for action in row} <= {"F", "B", "I", "W"}
    assert any("W" in action for row in plan["ranks"] for action in row)
    assert plan["makespan_ms"]["unfrozen"] <= plan["makespan_ms"]["host"]
    assert plan["mean_freeze_ratio"] <= 0.4


# The oracle's tests have tensor parallelism under every schedule, those above deferral under every schedule.
WITH_REPLICAS = [*(name for name in REPLICATED if name.startswith(("fsdp", "ddp"))), "tp", "tp zbv", "tp interleaved"]


@pytest.mark.parametrize("name", WITH_REPLICAS)
def test_masks_and_deferral_together_with_replicas(name: str) -> None:
    case = replace(REPLICATED[name], section=DEFERRED, ratios=PLANS, steps=len(PLANS))
    ranks = pool(4).run(train, case)
    check_oracle(case, ranks)
    assert all(rank["failure"] is None for rank in ranks)


MIXED = {
    schedule: Case(schedule=schedule, replicas="fsdp mixed", section=DEFERRED, ratios=0.0, recorded=False)
    for schedule in SCHEDULES
}
EXACT = {"goal": "exact", "max_freeze_ratio": 0.0}
SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


@pytest.mark.parametrize("schedule", [schedule for schedule in MIXED if schedule not in SPLIT])
@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_gradients_of_mixed_precision_are_added_up_as_the_host_does(schedule: str, granularity: str) -> None:
    case = replace(MIXED[schedule], section={**DEFERRED, "granularity": granularity})
    ours = pool(4).run(train, case)
    alone = pool(4).run(train, replace(case, section=None, ratios=None))
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["failure"] is None
        for weight, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][weight], value), weight


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("section", [DEFERRED, {"granularity": "token"}], ids=["deferred", "tokens"])
def test_sums_of_mixed_precision_that_depend_on_the_hosts_own_order_are_refused(
    schedule: str, section: dict[str, str]
) -> None:
    with pytest.raises(RanksFailed) as failed:
        pool(4).run(train, replace(MIXED[schedule], section=section))
    assert str(failed.value).count("their sums depend on its order; use ") == 4 * 4


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_goal_leaves_such_sums_to_the_host(schedule: str) -> None:
    case = replace(MIXED[schedule], section={}, ratios=None, steps=6)
    ours, alone = (pool(4).run(train, replace(case, section=section)) for section in (EXACT, None))
    for mine, theirs in zip(ours, alone, strict=True):
        for weight, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][weight], value), weight


def evaluated_and_detached(case: Case) -> list[float]:
    run = attached(case)
    losses = []
    for step in range(6):
        if step == 3 and run.adapter is not None:
            run.adapter.detach()
        losses += [run.train_step(step), run.evaluate(step)]
    assert not any("forward" in vars(module) for stage in run.stages for module in stage.submod.modules())
    assert all(parameter.requires_grad for parameter in run.named.values())
    return losses


@pytest.mark.parametrize(
    ("schedule", "replicas"), [("Schedule1F1B", ""), ("ScheduleInterleaved1F1B", ""), ("Schedule1F1B", "ddp")]
)
def test_evaluation_and_detaching_leave_the_host_as_it_was(schedule: str, replicas: str) -> None:
    """An evaluation makes the next step run its metadata pass. DDP then reduces its first microbatch twice."""
    case = Case(schedule=schedule, replicas=replicas, section=DEFERRED, ratios=0.0)
    ranks = pool(4 if replicas else 2)
    ours = ranks.run(evaluated_and_detached, case)
    assert ours == ranks.run(evaluated_and_detached, replace(case, section=None, ratios=None))
    assert any(ours[-1])
