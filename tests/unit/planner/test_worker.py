"""The planner in a process of its own: what it finds, and that nothing which befalls it reaches the training."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from problems import changed, plan_problem
from schedules import one_f_one_b

import tf_adapters.planner.worker as background
from tf_adapters.errors import SolverError
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.solve import solve
from tf_adapters.planner.worker import BackgroundPlan
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action

SCHEDULE = one_f_one_b(3, 6)
PROBLEM = plan_problem(
    schedule=SCHEDULE,
    times={
        a: Bounds(5.0 + a.microbatch % 2, 12.0 + a.stage) if a.freezable else Bounds(6.0, 6.0) for a in SCHEDULE.actions
    },
    communication={(Action.parse("0F0"), Action.parse("1F0")): 1.5},
    overhead={Action.parse("0F1"): 0.5},
    max_freeze_ratio=0.6,
)


def waited(made: BackgroundPlan) -> FreezePlan:
    """Poll until the plan is there, as training does at its steps."""
    while (plan := made.poll()) is None:
        time.sleep(0.05)
    return plan


def test_it_finds_the_plan_that_this_process_would():
    found = waited(BackgroundPlan(PROBLEM, time_limit_s=60.0))
    ours = solve(PROBLEM)
    assert found.freeze_ratio == pytest.approx(ours.freeze_ratio, abs=1e-12)
    assert found.makespan_ms == ours.makespan_ms


@pytest.mark.parametrize("limit", [float("inf"), 1e17, 1e6])
def test_a_limit_that_nobody_waits_for_is_as_none(limit):
    """A process's alarm takes no such number, and neither does GLOP."""
    ours = solve(PROBLEM, time_limit_s=limit)
    assert waited(BackgroundPlan(PROBLEM, time_limit_s=limit)).makespan_ms == ours.makespan_ms


def test_it_leaves_no_files_and_no_process():
    made = BackgroundPlan(PROBLEM, time_limit_s=60.0)
    folder = Path(made._folder.name)
    waited(made)
    assert not folder.exists()
    given_up = BackgroundPlan(PROBLEM, time_limit_s=60.0)
    folder, process = Path(given_up._folder.name), given_up._process
    given_up.close()
    assert process.poll() is not None
    assert not folder.exists()


def test_until_it_is_there_a_poll_is_none():
    made = BackgroundPlan(PROBLEM, time_limit_s=60.0)
    os.kill(made._process.pid, signal.SIGSTOP)
    try:
        assert made.poll() is None
    finally:
        os.kill(made._process.pid, signal.SIGCONT)
    assert waited(made).solver.name == "GLOP"


def test_a_process_that_is_killed_is_a_solver_error():
    """As by a kernel that is short of memory."""
    made = BackgroundPlan(PROBLEM, time_limit_s=60.0)
    made._process.kill()
    with pytest.raises(SolverError, match=r"^the planner was killed by SIGKILL$"):
        waited(made)


def test_a_process_that_hangs_is_stopped_at_its_limit(monkeypatch):
    monkeypatch.setattr(background, "_GRACE_S", 0.0)
    made = BackgroundPlan(PROBLEM, time_limit_s=0.2)
    os.kill(made._process.pid, signal.SIGSTOP)
    with pytest.raises(SolverError, match=r"^the planner was stopped: no plan within solver_time_limit_s, 0.2 s$"):
        waited(made)
    assert made._process.poll() is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_freeze_ratio": 2}, "max_freeze_ratio: 2.0 is not a number from 0 to 1"),
        ({"times": {}}, "times: '0F0' is missing"),
    ],
)
def test_its_error_is_one_line(change, words):
    with pytest.raises(SolverError, match=words) as caught:
        waited(BackgroundPlan(changed(PROBLEM, **change), time_limit_s=60.0))
    assert "\n" not in str(caught.value)


def test_an_output_that_is_no_plan_is_a_solver_error(monkeypatch):
    made = BackgroundPlan(PROBLEM, time_limit_s=60.0)
    made._process.wait()
    made._plan.write_text("{", encoding="utf-8")
    with pytest.raises(SolverError, match="the planner's output cannot be read"):
        made.poll()
