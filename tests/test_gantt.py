"""Where the chart's blocks lie, with numbers worked out by hand, and that a picture comes out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.report import Report
from tf_adapters.report.gantt import draw
from tf_adapters.report.layout import Block, Panel, after, before

RANKS = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
# 1F1B over two ranks, ms: 0F0 0-10, 1F0 10-20, 1B0 20-40, 1F1 40-50, 1B1 50-70, 0B0 40-60, 0B1 70-90.
TIMES = {text: [10.0, 10.0] if "F" in text else [10.0, 20.0] for texts in RANKS for text in texts}
PLAN = {
    "makespan_ms": {"unfrozen": 90.0, "planned": 65.0, "fully_frozen": 60.0},
    "freeze_ratio": {"0B0": 0.0, "0B1": 1.0, "1B0": 1.0, "1B1": 0.5},
    "start_ms": {
        **{"0F0": 0.0, "0F1": 10.0, "0B0": 30.0, "0B1": 55.0},
        **{"1F0": 10.0, "1B0": 20.0, "1F1": 30.0, "1B1": 40.0},
    },
    "duration_ms": {
        **{"0F0": 10.0, "0F1": 10.0, "0B0": 20.0, "0B1": 10.0},
        **{"1F0": 10.0, "1B0": 10.0, "1F1": 10.0, "1B1": 15.0},
    },
    "mean_freeze_ratio": 0.625,
    "stage_freeze_ratio": {"0": 0.5, "1": 0.75},
    "critical_path": ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"],
    "solver": {"name": "GLOP", "status": "OPTIMAL", "seconds": 0.01, "optimality_gap": 0.0},
}


def report(**changes: Any) -> Report:
    data = {
        "format": 1,
        "host": {"name": "deepspeed", "version": "0.19.8"},
        "schedule": {"ranks": RANKS},
        "status": "stable",
        "step": 400,
        "times": TIMES,
        "plan": PLAN,
    }
    return Report.from_json({**data, **changes})


def spans(panel: Panel) -> dict[str, tuple[float, float]]:
    return {str(block.action): (block.start_ms, block.end_ms) for block in panel.blocks}


def critical(panel: Panel) -> set[str]:
    return {str(block.action) for block in panel.blocks if block.critical}


def find(panel: Panel, text: str) -> Block:
    return next(block for block in panel.blocks if str(block.action) == text)


def test_before_starts_every_action_as_early_as_its_upper_bounds_allow() -> None:
    panel = before(report())
    assert spans(panel) == {
        "0F0": (0, 10),
        "0F1": (10, 20),
        "0B0": (40, 60),
        "0B1": (70, 90),
        "1F0": (10, 20),
        "1B0": (20, 40),
        "1F1": (40, 50),
        "1B1": (50, 70),
    }
    assert panel.end_ms == 90
    assert critical(panel) == {"0F0", "1F0", "1B0", "1F1", "1B1", "0B1"}
    assert {block.frozen for block in panel.blocks} == {0.0}


def test_rows_are_ranks_in_execution_order() -> None:
    panel = before(report())
    rows = [[str(block.action) for block in panel.blocks if block.row == row] for row in (0, 1)]
    assert rows == RANKS


def test_communication_delays_the_next_stage() -> None:
    panel = before(report(communication={"0F0->1F0": 5.0}))
    assert find(panel, "1F0").start_ms == 15
    assert panel.end_ms == 95


def test_after_is_the_plan() -> None:
    panel = after(report())
    assert panel is not None
    assert spans(panel)["0B1"] == (55, 65)
    assert spans(panel)["1B1"] == (40, 55)
    assert panel.end_ms == 65
    assert critical(panel) == set(PLAN["critical_path"])  # type: ignore[call-overload]
    assert [find(panel, text).frozen for text in ("0F0", "0B0", "1B1", "0B1")] == [0.0, 0.0, 0.5, 1.0]
    assert "62%" in panel.title


def test_stages_of_one_rank_get_lanes_in_stage_order() -> None:
    ranks = [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    times = {text: [1.0, 1.0] for texts in ranks for text in texts}
    panel = before(report(schedule={"ranks": ranks}, times=times, plan=None))
    assert [find(panel, text).lane for text in ("0F0", "3F0", "3B0", "1F0", "2F0")] == [0, 1, 1, 0, 1]
    assert panel.end_ms == 8


def test_no_plan_means_no_second_panel() -> None:
    assert after(report(plan=None)) is None


def test_what_cannot_be_drawn_is_said_in_one_line() -> None:
    with pytest.raises(ConfigError, match="nothing to draw yet: no action has been timed"):
        before(report(times={}, plan=None, status="warmup"))
    partial = {text: pair for text, pair in TIMES.items() if text != "1B1"}
    with pytest.raises(ConfigError, match="times has no entry for 1B1"):
        before(report(times=partial))
    with pytest.raises(ConfigError, match=r"plan\.start_ms has no entry for 0F0"):
        after(report(plan={**PLAN, "start_ms": {}}))
    with pytest.raises(ConfigError, match=r"plan\.duration_ms has no entry for 0F0"):
        after(report(plan={**PLAN, "duration_ms": {}}))
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        draw(report(), "batch.jpg")


def test_without_matplotlib_it_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnsupportedError, match=r'pip install "tf-adapters\[plot\]"'):
        draw(report(), tmp_path / "batch.png")


@pytest.mark.parametrize("plan", [PLAN, None])
def test_a_png_of_sensible_size_appears(tmp_path: Path, plan: dict[str, Any] | None) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "batch.png"
    draw(report(plan=plan), path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 1000
    assert height > (400 if plan else 300)


def test_an_svg_appears_whatever_the_file_is_called(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "batch"
    draw(report(), path, "svg")
    assert "<svg" in path.read_text(encoding="utf-8")
