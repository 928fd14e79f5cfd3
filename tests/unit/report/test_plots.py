"""Pictures of one run: the fitted line, what a report has something for, and ``show --plots``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tf_adapters.cli import main
from tf_adapters.errors import ConfigError
from tf_adapters.planner.solve import plan_from_json
from tf_adapters.report import plots
from tf_adapters.report.batch import batch_of
from tf_adapters.report.plots import rank_parts
from tf_adapters.report.schema import Report

RANKS = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
TIMES = {f"{stage}{kind}{m}": [5, 5] if kind == "F" else [5, 10] for stage in "01" for kind in "FB" for m in "01"}
PNG = b"\x89PNG"


def report(**more: Any) -> Report:
    data = {
        "format": 1,
        "host": {"name": "torch", "version": "2"},
        "schedule": {"ranks": RANKS},
        "status": "stable",
        "step": 12,
        "phases": {"warmup_end": 2, "monitoring_end": 6, "progressive_end": 10},
        **more,
    }
    return Report.from_json(data)


def samples(*afrs: float) -> dict[str, Any]:
    """Backwards of both stages that take 10 ms less 5 ms x AFR."""
    actions = [action for action in TIMES if "B" in action]
    return {"backward_ms": [{"action": a, "afr": afr, "ms": 10 - 5 * afr} for a in actions for afr in afrs]}


def planned() -> dict[str, Any]:
    return plan_from_json({"ranks": RANKS, "times": TIMES, "max_freeze_ratio": 0.8}).to_json()


FULL = {
    "measured": samples(0.0, 0.4, 1.0),
    "frozen_share": {"0": [0.0] * 6 + [0.4] * 6, "1": [0.0] * 6 + [0.8] * 6},
    "parameter_freeze_ratio": {"0": {"a": 0.3, "b": 0.5}, "1": {"c": 0.8}},
}


def test_a_line_through_points_on_a_line() -> None:
    line = plots.fitted([(0.0, 10.0), (0.5, 7.5), (1.0, 5.0)])
    assert line is not None
    assert (line.intercept, line.slope, line.r2) == pytest.approx((10.0, -5.0, 1.0))


def test_r2_is_the_share_of_the_variance_that_the_line_explains() -> None:
    line = plots.fitted([(0.0, 0.0), (0.0, 2.0), (1.0, 2.0), (1.0, 4.0)])
    assert line is not None
    assert (line.intercept, line.slope, line.r2) == pytest.approx((1.0, 2.0, 0.5))


@pytest.mark.parametrize("points", [[], [(0.5, 1.0)], [(0.5, 1.0), (0.5, 2.0)]])
def test_no_line_through_one_ratio(points: list[tuple[float, float]]) -> None:
    assert plots.fitted(points) is None


def test_times_that_do_not_depend_on_the_ratio_make_a_level_line() -> None:
    assert plots.fitted([(0.0, 3.0), (1.0, 3.0)]) == plots.FittedLine(3.0, 0.0, 1.0)


def test_backwards_by_stage() -> None:
    points = plots.backward_points(report(measured=samples(0.0, 1.0)))
    assert points == {stage: [(0.0, 10.0), (1.0, 5.0)] * 2 for stage in (0, 1)}


def test_a_first_stage_that_is_frozen_whole_has_no_backward_to_fit() -> None:
    points = [(0.0, 10.0), (0.5, 7.5), (1.0, 0.0)]
    assert plots.on_the_line(0, points) == points[:2]
    assert plots.on_the_line(1, points) == points


def test_the_planned_ratio_over_steps_is_the_plans_times_the_ramp() -> None:
    plan = planned()
    found = plots.planned_ratio_by_step(report(plan=plan))
    ratio = plan["stage_freeze_ratio"]["1"]
    assert found["1"] == pytest.approx([0.0] * 6 + [ratio * share for share in (0.25, 0.5, 0.75, 1, 1, 1)])


def test_a_report_without_figures_has_no_pictures(tmp_path: Path) -> None:
    empty = report()
    assert plots.plots_of(empty) == {}
    with pytest.raises(ConfigError, match="nothing to plot yet"):
        plots.draw_plots(empty, tmp_path)


def test_a_report_is_drawn_as_far_as_it_goes() -> None:
    assert set(plots.plots_of(report(measured=samples(0.0, 1.0)))) == {"backward_time"}
    assert set(plots.plots_of(report(plan=planned(), measured=samples(0.0)))) == {"freeze_ratio"}
    assert set(plots.plots_of(report(**FULL))) == {"backward_time", "freeze_ratio", "parameters"}


def test_a_ranks_bar_is_as_long_as_the_batch() -> None:
    shown = report(times=TIMES)
    assert set(plots.plots_of(shown)) == {"rank_times"}
    batch = batch_of(shown)
    assert batch is not None
    parts = {label: values for label, _, values in rank_parts(shown, batch.ranks)}
    assert [sum(of_rank) for of_rank in zip(*parts.values(), strict=True)] == pytest.approx([batch.span_ms] * 2)
    assert parts["weight gradient"] == pytest.approx([10.0, 10.0])
    unknown = report(times={action: [most, most] for action, (_, most) in TIMES.items()})
    in_one = {label: values for label, _, values in rank_parts(unknown, batch.ranks)}
    assert (in_one["backward"], in_one["weight gradient"]) == ([20.0, 20.0], [0.0, 0.0])


def test_new_fields_survive_being_written(tmp_path: Path) -> None:
    written = report(**FULL)
    written.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json") == written


def test_show_draws_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    report(**FULL).write(tmp_path / "report.json")
    folder = tmp_path / "new" / "plots"
    assert main(["show", str(tmp_path / "report.json"), "--plots", str(folder)]) == 0
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["backward_time.png", "freeze_ratio.png", "parameters.png"]
    assert all((folder / name).read_bytes().startswith(PNG) for name in files)
    printed = capsys.readouterr().out
    assert all(f"picture: {folder / name}" in printed for name in files)


def test_show_says_in_one_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    report(**FULL).write(tmp_path / "report.json")
    (tmp_path / "file").write_text("")
    assert main(["show", str(tmp_path / "report.json"), "--plots", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tf-adapters show: --plots: cannot write into")
    assert error.count("\n") == 1
