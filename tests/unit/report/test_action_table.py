"""``show --csv``: a row for each action, with measured and planned ms and freeze ratios."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from sample_reports import MEASURED, TIMES, report, report_data, report_of

from tf_adapters.cli import main
from tf_adapters.errors import ConfigError
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.report.action_table import COLUMNS, action_csv
from tf_adapters.report.schema import Report
from tf_adapters.schedule.orders import one_forward_one_backward


def rows(shown: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(action_csv(shown))))


def values(row: dict[str, str]) -> list[str | float]:
    return [text if name == "action" or not text else float(text) for name, text in row.items()]


def test_each_action_has_its_measured_and_planned_values() -> None:
    table = rows(report(measured=MEASURED))
    assert [row["position"] for row in table] == [*"0123", *"0123"]
    assert values(table[0]) == [0, 0, 0, 0, "F", 10, 10, 0, 10, 0, 1, "", ""]
    assert values(table[3]) == [0, 3, 0, 1, "B", 20, 10, 55, 10, 1, 1, 11, 1]
    assert values(table[5]) == [1, 1, 1, 0, "B", 20, 10, 20, 10, 1, 1, "", ""]


def test_without_a_plan_the_measured_times_are_there() -> None:
    table = rows(report(plan=None))
    assert values(table[2]) == [0, 2, 0, 0, "B", 20, 10, "", "", "", "", "", ""]
    with pytest.raises(ConfigError, match="no action has been timed yet"):
        action_csv(report(plan=None, times={}))


def test_the_halves_of_a_backward_share_its_times() -> None:
    measured = report_of(one_forward_one_backward(2, 2), lower=12.0)
    plan = solve(PlanProblem(measured.measurement, Limits(0.0, defer=True)))
    table = rows(measured.model_copy(update={"plan": plan}))
    halves = [row for row in table if row["action"] in "IW"]
    assert halves
    for row in halves:
        assert values(row)[5:7] == ([12, 12] if row["action"] == "I" else [8, 0])
        assert row["planned_freeze_ratio"] == "0.0"


def test_show_writes_or_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table = tmp_path / "report.json", tmp_path / "actions.csv"
    path.write_text(json.dumps(report_data()))
    assert main(["show", str(path), "--csv", str(table)]) == 0
    assert f"table: {table}" in capsys.readouterr().out
    assert table.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert len(table.read_text().splitlines()) == 1 + len(TIMES)
    assert main(["show", str(path), "--csv", "-"]) == 0
    assert capsys.readouterr().out == table.read_text()
    assert main(["show", str(path), "--csv", str(tmp_path / "none" / "a.csv")]) == 2
    assert capsys.readouterr().err.startswith("tf-adapters show: --csv: cannot write")
