"""Steps that overlap on DeepSpeed's engine: the loss is late, the value is the host's, and no bit changes.

Devices are emulated, so that four ranks on two cores wait for each other as on devices of their own. What the tests
compare has a margin of several actions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed_ranks import Case, batch, batches, build_engine, parameters_of
from logged import Lines
from overlapping_steps import OVERLAPPING, assert_ranks_meet, assert_ranks_overlap

from tf_adapters.hosts.late import LateTensor
from tf_adapters.testing.emulated_device import EmulatedDevice

pytestmark = pytest.mark.distributed

RATE = 2e6
"""FLOP/s, at which a stage's forward takes about 10 ms."""

MICROBATCHES = 8
CONFIG = {"gradient_accumulation_steps": MICROBATCHES}
ALONE = Case(stages=4, config=CONFIG, section=None, steps=18)
CASE = replace(ALONE, section=OVERLAPPING)


def overlapping(case: Case) -> dict[str, Any]:
    """Train with an evaluation on the way, and read every loss at the end."""
    import tf_adapters.deepspeed

    with Lines() as log, EmulatedDevice(RATE) if case.section else EmulatedDevice(1e12):
        engine = build_engine(case)
        adapter = tf_adapters.deepspeed.attach(engine)
        replica, losses, evaluated = engine.grid.data_parallel_id, [], []
        for step in range(case.steps):
            losses.append(engine.train_batch(iter(batch(step, replica, MICROBATCHES))))
            if step == 14:
                evaluated.append(engine.eval_batch(batches(range(100, 101), replica, MICROBATCHES)))
        result: dict[str, Any] = {
            "late": [isinstance(loss, LateTensor) for loss in losses],
            "group_loss": float(engine.dp_group_loss),
            "losses": [float(loss) for loss in losses],
            "evaluated": [float(loss) for loss in evaluated],
            "stage": engine.stage_id,
            "log": log.seen,
        }
        if adapter is not None:
            state = adapter.controller.state
            result |= {"known": state.measurement, "plan": state.plan, "failure": state.failure}
            result["meetings"] = tuple(adapter.controller.pipeline.meetings)
            adapter.detach()
            result["after"] = isinstance(engine.train_batch(iter(batch(99, replica, MICROBATCHES))), LateTensor)
        else:
            engine.train_batch(iter(batch(99, replica, MICROBATCHES)))
        result["parameters"] = parameters_of(engine)
    return result


def assert_same_bits(ours: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(ours, alone, strict=True):
        for what in ("losses", "evaluated", "group_loss"):
            assert mine[what] == theirs[what], what
        for name, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][name], value), name


def test_ranks_do_not_meet_and_every_loss_is_the_hosts(pools, tmp_path):
    ours = pools(4).run(overlapping, replace(CASE, output_dir=str(tmp_path)))
    assert_same_bits(ours, pools(4).run(overlapping, ALONE))
    for rank in ours:
        assert all(late == (rank["stage"] < 3) for late in rank["late"])
        assert not rank["after"], "the loss is still late after detach()"
    assert_ranks_overlap(ours)


NO_NORM = {"stage": 1, "compute_grad_norm": False}


@pytest.mark.parametrize("bf16", [{}, {"bf16": {"enabled": True, "check_grad_overflow": False}}], ids=["fp32", "bf16"])
def test_ranks_do_not_meet_where_zero_computes_no_norm(pools, tmp_path, bf16):
    config = {**CONFIG, "zero_optimization": NO_NORM, "zero_allow_untested_optimizer": True, **bf16}
    case = replace(CASE, config=config, output_dir=str(tmp_path))
    ours = pools(4).run(overlapping, case)
    assert_same_bits(ours, pools(4).run(overlapping, replace(case, section=None)))
    assert_ranks_overlap(ours)


MEET = {
    "clipping": ({"gradient_clipping": 0.5}, "gradient_clipping 0.5"),
    "zero1": (
        {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True}},
        "ZeRO's norm of all gradients",
    ),
    "overflow check": (
        {"zero_optimization": NO_NORM, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True}},
        "ZeRO's check_grad_overflow",
    ),
    "tied": ({}, "tied weights"),
}


@pytest.mark.parametrize("name", MEET)
def test_where_ranks_meet_the_log_says_what_makes_them_meet(pools, tmp_path, name):
    config, reason = MEET[name]
    alone = replace(ALONE, config={**CONFIG, **config}, tied=name == "tied", steps=12)
    ours = pools(4).run(overlapping, replace(alone, section=OVERLAPPING, output_dir=str(tmp_path)))
    assert_same_bits(ours, pools(4).run(overlapping, alone))
    assert_ranks_meet(ours, reason)


def test_the_loss_of_all_replicas_is_late(pools, tmp_path):
    """Two pipelines of two stages: the last stages reduce the loss, and each sends it to its own first stage."""
    alone = replace(ALONE, stages=2, steps=4)
    ours = pools(4).run(overlapping, replace(alone, section=OVERLAPPING, output_dir=str(tmp_path)))
    assert_same_bits(ours, pools(4).run(overlapping, alone))
    assert all(late == (rank["stage"] == 0) for rank in ours for late in rank["late"])
    assert len({tuple(rank["losses"]) for rank in ours}) == 1


def test_in_place_leaves_the_loss_to_the_host(pools, tmp_path):
    ours = pools(2).run(overlapping, replace(CASE, stages=2, section={}, steps=3, output_dir=str(tmp_path)))
    assert not any(late for rank in ours for late in rank["late"])
