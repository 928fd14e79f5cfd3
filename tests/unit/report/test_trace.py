"""Chrome traces: what Perfetto needs to open them, and that they say what the panels say."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sample_reports import MEASURED, RANKS, report

from tf_adapters.report.layout import panels_of
from tf_adapters.report.trace import trace_events, write_trace

STABLE = {"backward_ms": [{"action": f"{s}B{m}", "afr": 0.5, "ms": 12.0} for s in range(2) for m in range(2)]}


def slices(events: list[dict[str, Any]], process: int, thread: int) -> list[tuple[str, float, float]]:
    return [
        (event["name"], event["ts"], event["dur"])
        for event in events
        if (event["ph"], event["pid"], event["tid"]) == ("X", process, thread)
    ]


def test_planned_and_measured_are_tracks_side_by_side() -> None:
    events = list(trace_events(panels_of(report(measured=STABLE))))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        1: "before: nothing frozen",
        2: "after: planned, 62% of the weight gradients skipped",
        3: "measured: medians of stable freezing (50% skipped) put through the schedule's graph",
    }
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2]
    assert threads == ["rank 0: stage 0", "rank 1: stage 1", "critical path"]


def test_slices_are_the_actions_in_microseconds() -> None:
    events = list(trace_events(panels_of(report())))
    assert slices(events, 1, 2) == [
        ("1F0", 10e3, 10e3),
        ("1B0", 20e3, 20e3),
        ("1F1", 40e3, 10e3),
        ("1B1", 50e3, 20e3),
    ]
    assert [name for name, _, _ in slices(events, 2, 3)] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_every_event_has_what_the_format_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(panels_of(report(measured=MEASURED)), path)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["displayTimeUnit"] == "ms"
    for event in data["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["cat"] in ("forward", "backward")


def test_a_category_is_one_word_group() -> None:
    ranks, pair = [["0F0", "0I0", "0W0"]], [1.0, 1.0]
    halves = report(schedule={"ranks": ranks}, times=dict.fromkeys(ranks[0], pair), plan=None)
    found = {event["name"]: event["cat"] for event in trace_events(panels_of(halves)) if event["ph"] == "X"}
    assert found == {"0F0": "forward", "0I0": "backward input gradients", "0W0": "backward weight gradients"}


def test_slices_carry_the_freeze_ratio() -> None:
    events = list(trace_events(panels_of(report())))
    found = next(e for e in events if e["name"] == "1B1" and e["pid"] == 2)
    assert found["args"] == {"stage": 1, "microbatch": 1, "freeze ratio": 0.5, "on the critical path": True}


def test_slices_of_one_rank_do_not_overlap() -> None:
    events = list(trace_events(panels_of(report(measured=STABLE))))
    for process in (1, 2, 3):
        for thread in range(1, len(RANKS) + 1):
            rows = slices(events, process, thread)
            for (_, start, length), (_, following, _) in pairwise(rows):
                assert start + length <= following + 1e-6


def test_a_measured_track_needs_every_backward() -> None:
    partial = {"backward_ms": STABLE["backward_ms"][:3]}
    assert len(panels_of(report(measured=partial))) == 2
    assert len(panels_of(report(measured=STABLE, status="progressive"))) == 2


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_trace(panels_of(report()), tmp_path / "none" / "trace.json")
