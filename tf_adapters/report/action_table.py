"""The actions of a report's batch as CSV, one row for each, for a spreadsheet. Times are ms, ratios are in [0, 1]."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import replace

from tf_adapters.planner.forecast import durations_under
from tf_adapters.report.layout import after, planned_order, stable_samples
from tf_adapters.report.schema import Report
from tf_adapters.schedule.ir import Action

COLUMNS = (
    *("rank", "position", "stage", "microbatch", "action"),
    *("measured_nothing_frozen_ms", "measured_all_frozen_ms"),
    *("planned_start_ms", "planned_ms", "planned_freeze_ratio", "planned_critical"),
    *("stable_ms", "stable_freeze_ratio"),
)
"""``position`` counts a rank's actions from 0. ``planned_critical`` is 1 on the plan's critical path, else 0."""


def action_csv(report: Report) -> str:
    """Return a header and a row for each action, rank after rank in the order that runs. Unknown values are empty.

    Raises ConfigError if no action has been timed yet, or if the plan lacks an action.
    """
    unfrozen, frozen = _measured_ms(report, 0.0), _measured_ms(report, 1.0)
    planned, stable = _planned(report), stable_samples(report)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for rank, actions in enumerate(planned_order(report).ranks):
        for position, action in enumerate(actions):
            sample = stable.get(str(action))
            table.writerow((
                *(rank, position, action.stage, action.microbatch, action.kind.value),
                *(unfrozen[action], frozen[action]),
                *planned.get(action, ("", "", "", "")),
                *((sample.ms, sample.afr) if sample else ("", "")),
            ))  # fmt: skip
    return text.getvalue()


def _planned(report: Report) -> dict[Action, tuple[float, float, float, int]]:
    """Return start and duration in ms, freeze ratio and whether it is critical, by action; empty without a plan."""
    plan, panel = report.plan, after(report)
    if plan is None or panel is None:
        return {}
    return {
        block.action: (block.start_ms, plan.duration_ms[block.action], block.frozen, int(block.critical))
        for block in panel.blocks
        if block.step == 0
    }


def _measured_ms(report: Report, ratio: float) -> Mapping[Action, float]:
    """Return each action's ms at a freeze ratio of 0 or 1. The halves of a backward share what was measured of it."""
    times, actions = report.measurement.times, planned_order(report).actions
    if report.plan is None:
        return {action: times[action].lower if ratio else times[action].upper for action in actions}
    same, none = dict.fromkeys(actions, ratio), dict.fromkeys(actions, 0.0)
    return durations_under(replace(report.plan, freeze_ratio=same, duration_ms=none), times)
