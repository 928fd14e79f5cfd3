"""Which runs the accuracy study has, how it goes on after it was cut off, and the settings of a run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.accuracy import study as accuracy
from benchmarks.accuracy.cells import METHODS, Cell, append, grid, missing, read_records, section, sensitivity_grid
from benchmarks.accuracy.tasks import CONTEXT, FIRST_TOKEN, LAST_TOKEN, TASKS, load, passages
from tf_adapters.config import TimelyFreezeConfig

CELL = Cell("vit", "1f1b", "timely", 0)


def line(cell: Cell) -> dict[str, object]:
    return {"cell": asdict(cell), "task": asdict(TASKS[cell.task])}


def test_the_grid_has_every_combination_seed_by_seed() -> None:
    cells = grid(["vit", "text"], ["gpipe", "1f1b"], METHODS, 3, {})
    assert len({cell.key() for cell in cells}) == len(cells) == 3 * 2 * 2 * 6
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)


def test_settings_make_rows_of_their_own_for_the_methods_that_freeze() -> None:
    cells = grid(["vit"], ["1f1b"], ["none", "timely"], 1, {"gradient_scale": "computed_mean"})
    assert [cell.variant for cell in cells] == ["none", "timely gradient_scale=computed_mean"]


def test_every_run_of_the_sensitivity_study_varies_one_setting() -> None:
    cells = sensitivity_grid(["vit"], ["1f1b"], 2)
    assert len({cell.key() for cell in cells}) == len(cells)
    assert all(len(cell.settings) == (cell.method != "none") for cell in cells)


@pytest.mark.parametrize("cell", [*grid(["vit"], ["1f1b"], METHODS, 1, {}), *sensitivity_grid(["vit"], ["1f1b"], 1)])
def test_settings_of_a_run_are_valid(cell: Cell) -> None:
    config = TimelyFreezeConfig.parse(section(TASKS["vit"], cell, "runs"))
    assert all(getattr(config, name) == value for name, value in cell.settings.items())


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    path, other = tmp_path / "results.jsonl", replace(CELL, seed=1)
    assert missing([CELL, other], read_records(path), TASKS) == [CELL, other]
    append(path, line(CELL))
    assert missing([CELL, other], read_records(path), TASKS) == [other]


def test_a_run_of_another_length_is_another_run(tmp_path: Path) -> None:
    longer = {**TASKS, "vit": replace(TASKS["vit"], steps=9999)}
    assert missing([CELL], [line(CELL)], longer) == [CELL]


def test_a_line_that_was_cut_off_is_run_again_and_written_over(tmp_path: Path) -> None:
    path, other = tmp_path / "results.jsonl", replace(CELL, seed=1)
    append(path, line(CELL))
    with path.open("a") as file:
        file.write('{"cell": {"task": "vi')
    assert missing([CELL, other], read_records(path), TASKS) == [other]
    append(path, line(other))
    assert [Cell.of(record) for record in read_records(path)] == [CELL, other]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"cell\n{}\n')
    with pytest.raises(ValueError, match="Unterminated"):
        read_records(path)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("max_freeze_ratio=0.5", ("max_freeze_ratio", 0.5)),
        ("gradient_scale=computed_mean", ("gradient_scale", "computed_mean")),
        ("method=apf", ("method", "apf")),
    ],
)
def test_settings_on_the_command_line(text: str, parsed: tuple[str, object]) -> None:
    assert accuracy.setting(text) == parsed


def test_quick_runs_do_not_touch_the_results() -> None:
    quick, study = accuracy.parse_args(["--quick"]), accuracy.parse_args([])
    assert study.results.parent == accuracy.RESULTS
    assert accuracy.RESULTS not in quick.results.parents
    assert accuracy.shortened(TASKS["vit"], quick).steps < 20


def test_figures_are_kept_to_five_digits() -> None:
    assert accuracy.rounded({"a": [0.1234567, 3], "b": "text"}) == {"a": [0.12346, 3], "b": "text"}


def test_passages_are_equally_long_and_do_not_overlap() -> None:
    tokens = list(range(1000, 1000 + 2 * (CONTEXT - 2) + 5))
    found = passages(tokens)
    assert [len(passage) for passage in found] == [CONTEXT, CONTEXT]
    assert all((passage[0], passage[-1]) == (FIRST_TOKEN, LAST_TOKEN) for passage in found)
    assert [token for passage in found for token in passage[1:-1]] == tokens[:-5]


def test_a_task_may_train_on_some_of_its_samples_always_the_same() -> None:
    pytest.importorskip("sklearn")
    task = replace(TASKS["vit"], training=100)
    some = load(task, 0).training.tensors[0]
    every = load(TASKS["vit"], 0).training.tensors[0]
    assert len(some) == 100
    assert all(any(sample.equal(other) for other in every) for sample in some)
    assert load(task, 0).training.tensors[0].equal(some)


def test_a_task_beside_the_study_is_trained_only_where_it_is_named() -> None:
    assert accuracy.parse_args([]).tasks == ["text", "vit", "convnext"]
    assert accuracy.parse_args(["--tasks", "text-one-pass"]).tasks == ["text-one-pass"]
