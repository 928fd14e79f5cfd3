"""A run with nothing frozen: no word of freezing on its page and in its trace, no empty picture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sample_reports import MEASURED, PLAN, RANKS, TIMES, report
from schedules import one_f_one_b

from tf_adapters.measuring.measurement import Measurement
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.report import Report
from tf_adapters.report.gantt import draw_panels
from tf_adapters.report.layout import panels_of
from tf_adapters.report.page import as_text
from tf_adapters.report.plots import plots_of
from tf_adapters.report.terminal import page
from tf_adapters.report.trace import trace_events
from tf_adapters.schedule.durations import Bounds


def exact_report(**changes: Any) -> Report:
    """A run with goal exact, whose plan is the solver's. Stable steps took as long as planned."""
    schedule = one_f_one_b(2, 4)
    times = {action: Bounds(10.0, 20.0 if action.freezable else 10.0) for action in schedule.actions}
    plan = solve(PlanProblem(Measurement(schedule, times), Limits(max_freeze_ratio=0.0, defer=True)))
    stable = {"backward_ms": [{"action": str(a), "afr": 0.0, "ms": 10.0, "phase": "stable"} for a in plan.start_ms]}
    data = {
        "config": {"goal": "exact", "max_freeze_ratio": 0.0},
        "phases": {"warmup_end": 10, "monitoring_end": 20, "progressive_end": 20},
        "schedule": {"ranks": schedule.to_text()},
        "times": {str(action): [bounds.lower, bounds.upper] for action, bounds in times.items()},
        "plan": plan.to_json(),
        "measured": {**MEASURED, **stable, "mean_afr": {"0": 0.0, "1": 0.0}},
        "frozen_share": {"0": [0.0] * 400, "1": [0.0] * 400},
        "parameter_freeze_ratio": {"0": {}, "1": {}},
    }
    return report(**{**data, **changes})


UNPLANNED = {"plan": None, "measured": {"step_ms_unfrozen": 812.0}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"measured": {"step_ms_unfrozen": 1.0, "step_ms_stable": 1.2, "step_ratio": 1.2, "forward_pace": 1.5}},
        {"status": "planned", "measured": {"step_ms_unfrozen": 812.0, "planned_step_ms": 650.0}},
        {"status": "planning", **UNPLANNED},
        {"status": "monitoring", **UNPLANNED},
        {"status": "warmup", "times": {}, "plan": None, "measured": None},
        {"config": {"method": "none", "max_freeze_ratio": 0.0}},
    ],
)
def test_a_run_with_nothing_frozen_does_not_speak_of_freezing(changes: dict[str, Any]) -> None:
    shown = exact_report(**changes)
    panels = panels_of(shown) if shown.times else ()
    text = as_text(page(shown, panels)) + json.dumps(list(trace_events(panels)))
    assert not re.search("freez|frozen|skip|progressive", text)


def test_a_batch_of_goal_exact_is_drawn_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = exact_report()
    before, after, measured = panels_of(shown)
    assert before.title == "before: the host's order"
    assert after.title == "after: planned, weight gradients deferred"
    assert measured.title == "measured: medians of stable steps put through the schedule's graph"
    draw_panels((before, after, measured), "One batch", tmp_path / "batch.svg")
    assert "skipped" not in (tmp_path / "batch.svg").read_text(encoding="utf-8")
    assert set(plots_of(shown)) == {"rank_times"}
    in_host_order = exact_report(plan={**PLAN, "mean_freeze_ratio": 0.0}, schedule={"ranks": RANKS}, times=TIMES)
    assert [panel.title for panel in panels_of(in_host_order)] == [before.title]
