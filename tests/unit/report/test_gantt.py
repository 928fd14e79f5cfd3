"""Where the chart's blocks lie, with numbers worked out by hand, and that a picture comes out."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_reports import PLAN, RANKS, TIMES, report
from schedules import one_f_one_b, split_one_f_one_b, v_shape

from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.report.gantt import draw_panels
from tf_adapters.report.layout import Block, Panel, after, before, measured, panels_of, timeline
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, PipelineSchedule


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


def test_busy_times_and_bubbles_by_rank() -> None:
    panel = before(report())
    assert panel.busy_ms == (60.0, 60.0)
    assert panel.bubbles == pytest.approx((1 / 3, 1 / 3))
    assert panel.bubble == pytest.approx(1 / 3)
    assert [[str(block.action) for block in row] for row in panel.rows] == RANKS
    assert panel.stages == ((0,), (1,))


def test_measured_puts_the_stable_medians_through_the_graph() -> None:
    """Forwards keep their 10 ms, every backward takes 12: 10 + 10 + 12 + 10 + 12 + 12 = 66."""
    samples = [{"action": f"{s}B{m}", "afr": 0.5, "ms": 12.0} for s in range(2) for m in range(2)]
    panel = measured(report(measured={"backward_ms": samples}))
    assert panel is not None
    assert panel.end_ms == pytest.approx(66.0)
    assert spans(panel)["1B1"] == pytest.approx((42.0, 54.0))
    assert (find(panel, "1B0").frozen, find(panel, "1F0").frozen) == (0.5, 0.0)
    assert panel.title == "measured: medians of stable freezing (50% skipped) put through the schedule's graph"
    assert measured(report(measured={"backward_ms": samples}, status="progressive")) is None
    assert measured(report()) is None


def test_no_plan_means_no_second_panel() -> None:
    assert after(report(plan=None)) is None


def test_what_cannot_be_drawn_is_said_in_one_line() -> None:
    with pytest.raises(ConfigError, match="no action has been timed yet"):
        before(report(times={}, plan=None, status="warmup"))
    partial = {text: pair for text, pair in TIMES.items() if text != "1B1"}
    with pytest.raises(ConfigError, match="times: '1B1' is missing"):
        before(report(times=partial))
    with pytest.raises(ConfigError, match=r"plan\.start_ms has no entry for 0F0"):
        after(report(plan={**PLAN, "start_ms": {}}))
    with pytest.raises(ConfigError, match=r"plan\.duration_ms has no entry for 0F0"):
        after(report(plan={**PLAN, "duration_ms": {}}))
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        draw_panels(panels_of(report()), "One batch", "batch.jpg")


def test_without_matplotlib_it_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        draw_panels(panels_of(report()), "One batch", tmp_path / "batch.png")


@pytest.mark.parametrize("plan", [PLAN, None])
def test_a_png_of_sensible_size_appears(tmp_path: Path, plan: dict[str, Any] | None) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "batch.png"
    draw_panels(panels_of(report(plan=plan)), "One batch", path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 1000
    assert height > (400 if plan else 300)


def test_an_svg_appears_whatever_the_file_is_called(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "batch"
    draw_panels(panels_of(report()), "One batch", path, "svg")
    assert "<svg" in path.read_text(encoding="utf-8")


def batch(title: str, schedule: PipelineSchedule, durations: dict[Action, float]) -> Panel:
    return timeline(title, schedule, PipelineDag.from_schedule(schedule), durations)


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


def test_the_svg_says_what_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "batch.svg"
    draw_panels(panels_of(report()), "One batch on deepspeed", path)
    found = texts(path)
    for words in (
        "One batch on deepspeed: 2 pipeline ranks, 2 microbatches",
        "before: nothing frozen; bubble 33%",
        "after: planned, 62% of the weight gradients skipped; bubble 27%",
        "rank 1: stage 1",
        *("forward", "backward", "idle (bubble)", "critical path", "weight gradients skipped"),
        *("90.0 ms", "65.0 ms", "27.8% saved", "batch 1.38x", "time in the batch (ms)"),
    ):
        assert words in found
    # A number on each of the 2 x 8 blocks (the colour bar's "0%" and the axis have none of their own without a unit).
    assert found.count("1") == 8
    assert "stroke: #d1105a" in path.read_text(encoding="utf-8")


def test_the_same_chart_is_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        draw_panels(panels_of(report()), "One batch", tmp_path / f"{name}.svg")
        draw_panels(panels_of(report()), "One batch", tmp_path / f"{name}.png")
    for kind in ("svg", "png"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()


@pytest.mark.parametrize(
    ("schedule", "numbers", "names"),
    [
        (one_f_one_b(4, 8), True, ["rank 3: stage 3"]),
        (v_shape(4, 8), True, ["rank 3: stages 3, 4"]),
        (split_one_f_one_b(4, 8), True, ["backward, input gradients", "backward, weight gradients"]),
        (one_f_one_b(16, 64), False, ["rank 15: stage 15"]),
    ],
)
def test_large_batches_lose_their_numbers_and_keep_their_marks(
    tmp_path: Path, schedule: PipelineSchedule, numbers: bool, names: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "batch.svg"
    panel = batch("all", schedule, dict.fromkeys(schedule.actions, 10.0))
    draw_panels([panel], "Batch", path)
    found = texts(path)
    assert ("7" in found) is numbers
    for name in (*names, "critical path", "idle (bubble)"):
        assert name in found
    # Frames would hide the colours of narrow blocks: there the critical path is filled.
    assert ("stroke: #d1105a" in path.read_text()) is numbers
    assert ("fill: #d1105a" in path.read_text()) is not numbers


def test_panels_are_compared_with_what_they_are_said_to_replace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "batch.svg"
    schedule = one_f_one_b(2, 2)
    slow, fast = (batch(f"{ms}", schedule, dict.fromkeys(schedule.actions, ms)) for ms in (10.0, 5.0))
    draw_panels([slow, fast], "Batch", path, compared_ms=[slow.end_ms, fast.end_ms])
    assert not [text for text in texts(path) if "saved" in text]
    draw_panels([slow, fast], "Batch", path)
    assert "50.0% saved" in texts(path)


def test_an_action_without_duration_leaves_no_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    schedule = one_f_one_b(2, 1)
    lengths = {action: 0.0 if str(action) == "0B0" else 10.0 for action in schedule.actions}
    some, every = tmp_path / "some.svg", tmp_path / "every.svg"
    draw_panels([batch("batch", schedule, lengths)], "Batch", some)
    draw_panels([batch("batch", schedule, dict.fromkeys(lengths, 10.0))], "Batch", every)
    assert some.read_text().count("stroke: #ffffff") == every.read_text().count("stroke: #ffffff") - 1
