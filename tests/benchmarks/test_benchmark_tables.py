"""Tables in docs/ show the committed results of benchmarks, and results are replaced row by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.core import control, deferral, token_cost
from benchmarks.hosts import balance, compiled, emulated, imbalance, levers, memory
from benchmarks.language_model import study
from benchmarks.language_model.table import STEPS, WALL_CLOCK, by_task, contrasts, gains
from benchmarks.language_model.ways import GOALS, LEVERS, RETIRED
from benchmarks.shared.files import keep_row, markdown_table, put_table


def table_of_control() -> str:
    rows = control.read_rows()
    return control.table_of(list(dict.fromkeys(row.event for row in rows if row.ranks in control.LARGE)), rows)


def table_of_deferral() -> str:
    record = json.loads(deferral.RESULTS.read_text())
    return deferral.table(record["rows"], record["planner"])


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "control": (control.ROOT / "docs" / "algorithm.md", table_of_control),
    "deferral": (deferral.PAGE, table_of_deferral),
    "token_cost": (token_cost.PAGE, lambda: token_cost.table(json.loads(token_cost.RESULTS.read_text())["rows"])),
    "balance": (balance.PAGE, lambda: balance.table(balance.read_rows())),
    "compiled": (compiled.PAGE, lambda: compiled.table(json.loads(compiled.RESULTS.read_text())["rows"])),
    "emulated": (emulated.PAGE, lambda: emulated.table(emulated.read_rows())),
    "imbalance": (imbalance.PAGE, lambda: imbalance.table(imbalance.read_rows())),
    "levers": (levers.PAGE, lambda: levers.table(json.loads(levers.RESULTS.read_text()))),
    "memory": (memory.PAGE, lambda: memory.table(memory.read_rows())),
    "language_model": (study.PAGE, lambda: gains(by_task(study.read()), WALL_CLOCK, (*GOALS, *RETIRED))),
    "language_model_levers": (study.PAGE, lambda: gains(by_task(study.read()), WALL_CLOCK, LEVERS)),
    "language_model_steps": (study.PAGE, lambda: gains(by_task(study.read()), STEPS)),
    "language_model_contrasts": (study.PAGE, lambda: contrasts(by_task(study.read()))),
}
"""By the name of a table in its page: the page, and the table from the committed results."""


@pytest.mark.parametrize("name", TABLES)
def test_a_page_shows_the_committed_results(name: str, tmp_path: Path) -> None:
    page, table = TABLES[name]
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    put_table(copy, name, table())
    assert copy.read_text() == page.read_text()


def test_an_empty_cell_of_a_table_is_one_space() -> None:
    assert markdown_table(["", "a"], [["b", ""]]) == "| | a |\n| --- | --- |\n| b | |"


def test_a_row_is_replaced_and_all_rows_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    for name, row in (("b", 1), ("a", 2), ("b", 3)):
        keep_row(path, "rows", {name: row}, ["a", "b", "c"], machine="m")
    assert json.loads(path.read_text()) == {"machine": "m", "rows": {"a": 2, "b": 3}}
    assert path.read_text().index('"a"') < path.read_text().index('"b"')
