"""What each lever would bring to a run that was measured, on hand-made times."""

from __future__ import annotations

import pytest
from problems import plan_problem
from sample_reports import report_of

from tf_adapters.advice import levers as module
from tf_adapters.advice.levers import Levers, goal_lines, levers
from tf_adapters.planner.forecast import forecast
from tf_adapters.planner.solve import solve
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action
from tf_adapters.schedule.orders import interleaved, one_forward_one_backward


def steps_of(found: Levers) -> dict[str, float]:
    return {lever.name: lever.step_ms for lever in found.others}


def freezes(name: str) -> bool:
    return "limit" in name or name == "goal paper"


def test_another_limit_is_planned_beside_those_of_the_goals():
    schedule = one_forward_one_backward(4, 8)
    same, lower = (steps_of(levers(report_of(schedule, config={"max_freeze_ratio": limit}))) for limit in (0.8, 0.2))
    goals = ("goal exact", "goal paper")
    assert {name for name in same if freezes(name)} - {*goals} == {
        "sampled tokens, deferred, limit 0.8",
        "sampled tokens, limit 0.8",
        "freezing, deferred, limit 0.8",
    }
    assert [lower[goal] for goal in goals] == pytest.approx([same[goal] for goal in goals])
    assert lower["goal paper"] < lower["freezing, limit 0.2"]


def test_each_lever_is_what_the_forecast_promises():
    schedule = one_forward_one_backward(4, 8)
    report = report_of(schedule, measured={"step_ms_unfrozen": 400.0})
    steps = steps_of(levers(report))
    bounds = {Action.parse(text): Bounds(*pair) for text, pair in report.times.items()}
    problem = plan_problem(schedule, bounds, 0.8, unfrozen_step_ms=400.0, max_microbatch_freeze_ratio=0.9)
    promised = forecast(problem.measurement, solve(problem))
    assert steps["goal paper"] == pytest.approx(promised.planned_ms)
    assert steps["schedule gpipe"] == pytest.approx(400.0)  # equal stages: as long as 1F1B
    assert "schedule 1f1b" not in steps
    exact, interleaving = steps["goal exact"], steps["schedule interleaved, 2 stages a rank"]
    assert 300.0 < steps["schedule zbv, 2 stages a rank"] < interleaving < 400.0
    assert 300.0 < exact < 400.0
    # A rank of 1F1B computes 240 ms; 20 ms are passed before it begins or after it ended, wherever it is.
    assert all(step >= 400.0 - (330.0 - 240.0) for name, step in steps.items() if not freezes(name))


def test_the_lines_of_the_goals_are_their_rows_of_the_page():
    report = report_of(one_forward_one_backward(4, 8), lower=20.0)
    found = levers(report)
    rows = [lever for lever in found.others if lever.name.startswith("goal ")]
    lines = goal_lines(report)
    assert [row.name for row in rows] == ["goal exact, placement v (ZBV on torch)", "goal exact", "goal paper"]
    steps = [f"{row.name}: planned {row.step_ms:,.1f} ms a step, {100.0 / row.step_ms:.2f}x" for row in rows]
    assert lines[:3] == [f"{step}; weight gradients: {row.gradients}" for step, row in zip(steps, rows, strict=True)]
    assert lines[3:] == [note for note in found.notes if "drawing tokens" not in note]
    assert goal_lines(report_of(one_forward_one_backward(4, 8), config={"method": "timely"})) == []


def test_forwards_move_where_the_run_says_that_they_may():
    """Whatever the host is called. An older report does not say it: with one stage on a rank they may."""
    schedule, host = one_forward_one_backward(4, 8), {"name": "megatron-core", "version": "0"}
    exact = {}
    for may in (True, False, None):
        report = report_of(schedule, host=host, moves_forwards=may, steps="overlap")
        exact[may] = min(ms for name, ms in steps_of(levers(report)).items() if name.startswith("goal exact"))
    assert exact[True] < exact[False]
    assert exact[None] == exact[True]
    assert not report_of(interleaved(2, 4)).forwards_may_move


def test_memory_is_counted_in_microbatches_of_a_whole_rank():
    held = {lever.name: lever.held for lever in levers(report_of(one_forward_one_backward(4, 8))).others}
    assert held["goal exact"] == 4
    assert held["schedule gpipe"] == 8
    assert held["schedule interleaved, 2 stages a rank"] == 5.5  # 11 of half a rank's layers
    assert held["schedule zbv, 2 stages a rank"] == 4


def test_what_was_not_measured_is_assumed_and_said():
    """Without masks both times of a backward are one: a weight gradient then counts as a forward."""
    schedule = one_forward_one_backward(4, 8)
    assumed = levers(report_of(schedule, lower=20.0))
    assert "was not measured" in assumed.notes[0]
    assert steps_of(assumed) == pytest.approx(steps_of(levers(report_of(schedule, lower=10.0))))


def test_schedules_that_do_not_fit_are_left_out():
    """Nine microbatches on four ranks make no rounds of equal size."""
    names = {name for name in steps_of(levers(report_of(one_forward_one_backward(4, 9)))) if "schedule" in name}
    assert names == {"schedule gpipe", "schedule zbv, 2 stages a rank"}


def test_a_large_pipeline_is_shown_without_its_longest_plans(monkeypatch):
    monkeypatch.setattr(module, "MOST_ACTIONS", 60)
    found = levers(report_of(one_forward_one_backward(4, 8)))
    assert any("plans for 64 actions take long" in note for note in found.notes)
    assert not any(freezes(lever.name) for lever in found.others)
    assert any(lever.name == "goal exact" for lever in found.others)
