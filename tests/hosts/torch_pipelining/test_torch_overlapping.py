"""Steps that overlap on torch's schedules: found out, planned for, and the same bits as the host alone.

Devices are emulated, so that four ranks on two cores wait for each other as on devices of their own. What the tests
compare has a margin of several actions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from logged import Lines
from overlapping_steps import OVERLAPPING, assert_ranks_overlap
from torch_ranks import Case, Run, attached, pool, values

from tf_adapters.report import Report
from tf_adapters.testing.emulated_device import EmulatedDevice

pytestmark = pytest.mark.distributed

RATE = 1.5e6
"""FLOP/s, at which a stage's forward takes about 10 ms."""

CASE = Case(ranks=4, microbatches=8, section=OVERLAPPING, steps=20)


def overlapping(case: Case, meets: bool = False) -> dict[str, Any]:
    """Train; with ``meets`` all ranks meet after every step."""
    import torch.distributed as dist

    with Lines() as log, EmulatedDevice(RATE) if case.section else EmulatedDevice(1e12):
        run = attached(case)
        losses = []
        for step in range(case.steps):
            losses.append(run.train_step(step))
            if meets:
                dist.barrier()
        result: dict[str, Any] = {"losses": losses, "parameters": values(run), "log": log.seen}
        if run.adapter is not None:
            state = run.adapter.controller.state
            result |= {"known": state.measurement, "plan": state.plan, "failure": state.failure}
            run.adapter.detach()
    return result


def assert_same_bits(ours: list[dict[str, Any]], case: Case) -> None:
    alone = pool(4).run(overlapping, replace(case, section=None))
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["parameters"].keys() == theirs["parameters"].keys()
        for name, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][name], value), name


def test_ranks_that_do_not_meet_get_a_plan_for_the_period(tmp_path):
    case = replace(CASE, output_dir=str(tmp_path))
    ranks = pool(4).run(overlapping, case)
    assert_same_bits(ranks, case)
    assert_ranks_overlap(ranks)
    assert all(set(rank["known"].between_steps) == {0, 1, 2, 3} for rank in ranks)
    report = Report.read(tmp_path / "timely_freeze" / "report.json")
    assert report.steps == "overlap"
    assert report.measurement.between_steps == pytest.approx(ranks[0]["known"].between_steps)


def test_ranks_that_meet_get_a_plan_for_the_batch_and_a_line_that_says_what_it_costs(tmp_path):
    case = replace(CASE, output_dir=str(tmp_path))
    ranks = pool(4).run(overlapping, case, True)
    for rank in ranks:
        assert rank["failure"] is None
        assert rank["known"].steps == "meet"
        assert rank["plan"].period_ms is None
    for line in ranks[0]["log"]:  # if the measured cost is worth a line
        if "all ranks meet between steps" in line:
            assert "a norm over all gradients, a reduced loss or a barrier" in line


def counted(case: Case) -> list[int]:
    """How many messages of ours each step sends."""
    import tf_adapters.collectives as collectives

    calls = [0]
    for name in ("gather", "collect", "broadcast", "scatter"):
        method = getattr(collectives.ProcessGroupCollectives, name)

        def count(self: Any, value: Any, method: Any = method) -> Any:
            calls[0] += 1
            return method(self, value)

        setattr(collectives.ProcessGroupCollectives, name, count)
        count.method = method  # type: ignore[attr-defined]
    try:
        run = attached(case)
        of_step = []
        for step in range(case.steps):
            before = calls[0]
            run.train_step(step)
            of_step.append(calls[0] - before)
        run.adapter.detach()
    finally:
        for name in ("gather", "collect", "broadcast", "scatter"):
            setattr(
                collectives.ProcessGroupCollectives,
                name,
                getattr(collectives.ProcessGroupCollectives, name).method,
            )
    return of_step


def test_a_stable_step_sends_no_message_of_ours():
    """Except by the report after the tenth stable step: ranks would meet for it."""
    case = replace(CASE, section={**OVERLAPPING, "monitoring_precision": 1.0}, steps=24)
    for of_step in pool(4).run(counted, case):
        assert sum(of_step[:8]) > 0
        stable = of_step[12:]
        assert stable.count(0) >= len(stable) - 1, of_step


def interrupted(case: Case) -> dict[str, Any]:
    """Train with evaluation between steps, save after step 12, go on in a new run from there."""
    with EmulatedDevice(RATE) if case.section else EmulatedDevice(1e12):
        run = attached(case)
        losses: list[float] = []

        def train(run: Run, steps: range) -> None:
            for step in steps:
                losses.append(run.train_step(step))
                if step % 5 == 0:
                    losses.append(run.evaluate(step))

        train(run, range(14))
        plan = None
        if run.adapter is not None:
            saved, state = run.adapter.state_dict(), run.adapter.controller.state
            plan, known = state.plan, state.measurement
            run.adapter.load_state_dict(saved)
            again = run.adapter.controller.state
            assert again.plan == plan
            assert again.measurement == known
            assert known.steps == "overlap"
        train(run, range(14, 20))
        if run.adapter is not None:
            run.adapter.detach()
    return {"losses": losses, "parameters": values(run)}


def test_evaluation_and_a_checkpoint_between_overlapping_steps_change_no_bit(tmp_path):
    case = replace(CASE, output_dir=str(tmp_path))
    ours = pool(4).run(interrupted, case)
    alone = pool(4).run(interrupted, replace(case, section=None))
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["losses"] == theirs["losses"]
        for name, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][name], value), name
