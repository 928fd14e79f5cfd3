"""report.json (round trip, atomic write, one-line errors), its summary in every state, ``show``."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_reports import MEASURED, PLAN, TIMES, report

from tf_adapters.cli import main
from tf_adapters.errors import ConfigError
from tf_adapters.report import Report
from tf_adapters.report.page import Page, Table, as_text, print_page
from tf_adapters.report.terminal import page


def test_json_round_trip_keeps_everything() -> None:
    first = report(measured=MEASURED, note=["a bound was clamped"], config={"max_freeze_ratio": 0.8})
    data = json.loads(json.dumps(first.to_json()))
    assert Report.from_json(data) == first
    assert data["plan"] == PLAN
    assert data["times"] == TIMES
    assert data["measured"] == MEASURED
    assert data["format"] == 1


def test_unknown_keys_of_newer_versions_are_ignored() -> None:
    data = report().to_json()
    data["invented"] = 1
    data["measured"]["invented"] = {"a": 2}
    assert Report.from_json(data) == report()


def test_absent_and_null_parts_read_alike() -> None:
    bare = report(plan=None, times={})
    assert report(plan=None, times=None, measured=None, note=None) == bare
    assert bare.measured.step_ms_unfrozen is None


def test_write_makes_folders_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "timely_freeze" / "report.json"
    report(plan=None).write(path)
    report().write(path)
    assert Report.read(path) == report()
    assert os.listdir(path.parent) == ["report.json"]


def test_a_failed_write_keeps_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    report(step=1).write(path)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        report(step=2).write(path)
    assert Report.read(path).step == 1
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "this is not a report: a report is a JSON object"),
        ("{}", 'this is not a report: it has no field "format"'),
        (json.dumps(PLAN), "this is a plan and not the report.json"),
        (json.dumps({"ranks": [], "times": {}}), "this is input for the planner"),
        ('{"format": 2}', "format 2 is newer than this version reads"),
        ('{"format": "one"}', "format is 'one': it must be an integer"),
        ('{"format": 1}', "host: missing"),
        (b"\xff\xfe", "is not JSON"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        Report.read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        Report.read(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        Report.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "sleeping"}, "status: 'sleeping' is not 'warmup'"),
        ({"times": {"0F0": [1.0]}}, "times['0F0']"),
        ({"times": {"0F0": [-1.0, 1.0]}}, "times['0F0'][0]: -1.0"),
        ({"measured": {"mean_afr": {"0": -0.5}}}, "measured['mean_afr']['0']: -0.5"),
        ({"measured": {"step_ms_stable": float("nan")}}, "measured['step_ms_stable']: nan"),
        ({"plan": {"makespan_ms": {}}}, "plan['makespan_ms']['unfrozen']: missing"),
        ({"schedule": {"ranks": [["0F0", "nonsense"]]}}, "'nonsense' is not an action"),
    ],
)
def test_the_first_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        report(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_measurement_fits_the_schedule() -> None:
    with pytest.raises(ConfigError, match="communication: '0F0->0F1' is not an edge between stages of the schedule"):
        assert report(communication={"0F0->0F1": 1.0}).measurement


def test_summary_leads_with_what_was_gained() -> None:
    text = as_text(page(report(measured=MEASURED, config={"max_freeze_ratio": 0.8})))
    known = "1.32x as fast as the host alone (1.29x to 1.34x; 795.0 ms in 8 control steps)"
    assert text.splitlines()[0] == f"step 601 ms: {known}"
    assert "skip 62% of the weight gradients on average, limit 80% per stage" in text
    assert "90 ms nothing frozen, 65 ms planned, 60 ms everything frozen" in text
    assert "GLOP, optimal in 0.01 s" in text
    assert "3.00 GiB -> 2.00 GiB" in text


def test_compilations_are_shown_where_there_are_any() -> None:
    compiled = report(measured=MEASURED, compilations={"first_step": 4, "later": 1})
    assert "4 graphs up to the first step, 1 later" in as_text(page(compiled))
    assert "graphs up to" not in as_text(page(report(measured=MEASURED)))


def test_a_speedup_is_over_control_steps_or_not_known() -> None:
    ranks = [["0F0", "0F1", "0I0", "0B1", "0W0"], ["1F0", "1B0", "1F1", "1B1"]]
    exact = {**PLAN, "freeze_ratio": {}, "mean_freeze_ratio": 0.0, "deferrable_share": {"0": 0.5}, "ranks": ranks}
    own = {**exact, "ranks": None}
    early = {**MEASURED, "speedup": None, "speedup_interval": None, "host_step_ms": None, "control_steps": 2}
    unknown = "step 601 ms: the speed over the host alone is not known yet: 2 of 6 control steps have run"
    noisy = {**MEASURED, "speedup": 1.41, "speedup_interval": [0.0, 2.14]}
    assert report(measured=noisy, plan=PLAN).speed == (
        "no difference to the host alone is shown by 8 control steps (0.00x to 2.14x)"
    )
    for plan, line in (
        (exact, unknown),
        (PLAN, unknown),
        (own, "step 601 ms: every step runs as the host alone"),
        (None, "step 601 ms: the speed over the host alone is not measured"),
    ):
        assert as_text(page(report(measured=early, plan=plan))).splitlines()[0] == line
    text = as_text(page(report(measured={**MEASURED, "mean_afr": {}}, plan=exact, config={"placement": "v"})))
    assert text.splitlines()[0].startswith("step 601 ms: 1.32x as fast as the same V without deferral (")
    text = as_text(page(report(measured=MEASURED, config={"schedule": "gpipe"})))
    assert text.splitlines()[0].startswith("step 601 ms: 1.32x as fast as the same GPipe with nothing skipped (")


def test_a_run_says_that_freezing_has_gained_nothing_only_if_control_steps_do() -> None:
    lost = {**MEASURED, "speedup": 0.98, "speedup_interval": [0.97, 0.99]}
    assert "has not made the step faster" in as_text(page(report(measured=lost)))
    assert "has not made the step faster" not in as_text(page(report(measured=MEASURED)))
    assert "pace" not in as_text(page(report(measured=MEASURED)))


def test_table_compares_plan_and_run_per_stage() -> None:
    lines = as_text(page(report(measured=MEASURED))).splitlines()
    header = next(number for number, line in enumerate(lines) if line.lstrip().startswith("stage  rank"))
    # Stage 0: of equal samples the last counts, of others the nearest to the plan: (21 + 11) / 2.
    assert lines[header + 1].split() == ["0", "0", "50%", "49%", "20.0", "16.0"]
    # Stage 1 has no samples: nothing is made up.
    assert lines[header + 2].split() == ["1", "1", "75%", "76%", "20.0", "-"]


def test_split_backwards_add_up_their_halves() -> None:
    ranks = [["0F0", "0I0", "0W0"]]
    times = {"0F0": [5.0, 5.0], "0I0": [6.0, 6.0], "0W0": [1.0, 7.0]}
    measured = {"backward_ms": [{"action": "0W0", "afr": 1.0, "ms": 1.5}], "mean_afr": {"0": 1.0}}
    text = as_text(page(report(schedule={"ranks": ranks}, times=times, plan=None, measured=measured)))
    assert text.splitlines()[-1].split() == ["0", "0", "-", "100%", "13.0", "7.5"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"status": "warmup", "step": 3, "times": {}, "plan": None},
            ["step time not measured yet", "warming up", "none yet"],
        ),
        (
            {"status": "monitoring", "times": {}, "plan": None, "phases": {"warmup_end": 10}},
            ["step time not measured yet", "timing the steps", "last step of warm-up 10"],
        ),
        (
            {"status": "progressive", "measured": {"step_ms_unfrozen": 812.0, "planned_step_ms": 650.0}},
            ["step 812 ms with nothing frozen while monitoring; 650 ms planned, stable freezing still to be measured"],
        ),
        (
            {"status": "failed", "plan": None, "times": {}, "note": ["the solver ended ABNORMAL"]},
            ["failed: the notes below say why", "note: the solver ended ABNORMAL"],
        ),
        (
            {
                "status": "failed",
                "schedule": {"ranks": [["2F0"], []]},
                "times": {"2F0": [1, 1]},
                "plan": None,
            },
            ["failed: the notes below say why"],
        ),
        ({"status": "failed", "schedule": {"ranks": []}, "times": {}, "plan": None}, ["0 stages on 0 ranks"]),
        ({"status": "disabled", "plan": None, "times": {}}, ["disabled: the host trains as if"]),
        (
            {"measured": {"step_ms_unfrozen": 100.0, "step_ms_stable": 125.0, "step_ratio": 1.25}},
            ["step 125 ms: the speed over the host alone is not known yet: 0 of 6 control steps have run"],
        ),
        (
            {"measured": {"step_ms_unfrozen": 1.0, "step_ms_stable": 1.2, "step_ratio": 1.2, "forward_pace": 1.5}},
            ["forwards, which do not freeze, take 1.50x what they took while monitoring"],
        ),
    ],
)
def test_summary_of_partial_states(changes: dict[str, Any], expected: list[str]) -> None:
    text = as_text(page(report(**changes)))
    for piece in expected:
        assert piece in text


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_terminal_gets_the_same_words_with_and_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    shown = report(measured=MEASURED, note=["[bold] is no markup"])
    with_rich = _Terminal()
    print_page(page(shown), with_rich)
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    without = _Terminal()
    print_page(page(shown), without)
    assert without.getvalue() == as_text(page(shown)) + "\n"
    for piece in ("1.32x as fast as", "really skipped", "49%", "note: [bold] is no markup"):
        assert piece in with_rich.getvalue()
        assert piece in without.getvalue()


@pytest.mark.parametrize("width", [80, 60, 1])
def test_a_narrow_terminal_wraps_cells_and_keeps_columns(width: int) -> None:
    rows = (
        ("schedule interleaved-zero-bubble, 2 stages a rank", "1,487.0", "42% of their time saved"),
        ("now", "9", ""),
    )
    shown = Page("headline", (), (Table("title", ("", "step ms, planned", "weight gradients"), rows),))
    lines = as_text(shown, table_width=width).splitlines()[3:]
    assert len({len(line) for line in lines}) == 1  # right-aligned columns
    assert len(lines[0]) <= max(width, len("interleaved-zero-bubble,") + 2 + len("planned") + 2 + len("gradients"))
    assert " ".join(" ".join(lines).split()).count("interleaved-zero-bubble,") == 1


def show(*arguments: str) -> int:
    return main(["show", *arguments])


def test_show_prints_and_draws_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "report.json", tmp_path / "batch.png"
    report(measured=MEASURED).write(path)
    assert show(str(path)) == 0
    assert "add --png FILE or --svg FILE" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["report.json"]
    assert show(str(path), "--png", str(picture)) == 0
    assert picture.stat().st_size > 1000
    assert f"picture: {picture}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plan.json", "missing.json"])
def test_show_refuses_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN), encoding="utf-8")
    assert show(str(tmp_path / name)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert ("this is a plan" if name == "plan.json" else "no such file") in err


def test_show_draws_no_schedule_that_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.json"
    report(schedule={"ranks": [["0F0"]]}, plan=None).write(path)
    assert show(str(path), "--png", str(tmp_path / "batch.png")) == 2
    assert "0F0 has no backward" in capsys.readouterr().err


def test_show_says_why_there_is_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.json"
    report(times={}, plan=None, status="warmup").write(path)
    assert show(str(path), "--svg", str(tmp_path / "batch.svg")) == 2
    assert "no action has been timed yet" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["report.json"]


def test_show_draws_a_chart_and_writes_everything_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.json"
    samples = [{"action": f"{s}B{m}", "afr": 0.5, "ms": 12.0} for s in range(2) for m in range(2)]
    report(measured={"backward_ms": samples}).write(path)
    files = [str(tmp_path / name) for name in ("a.png", "a.svg", "a.json")]
    assert show(str(path), "--png", files[0], "--svg", files[1], "--trace", files[2]) == 0
    out = capsys.readouterr().out
    for words in ("before: nothing frozen: 90.0 ms", "after: planned", "measured: medians of stable", "rank 1 "):
        assert words in out
    assert [line for line in out.splitlines() if line.startswith(("picture", "trace"))] == [
        f"picture: {files[0]}",
        f"picture: {files[1]}",
        f"trace: {files[2]}",
    ]
    assert all(Path(file).stat().st_size > 1000 for file in files)
    assert show(str(path), "--no-gantt") == 0
    assert "rank 1 " not in capsys.readouterr().out


def test_show_works_while_nothing_is_timed_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    report(times={}, plan=None, status="warmup").write(path)
    assert show(str(path)) == 0
    out = capsys.readouterr().out
    assert "warming up" in out
    assert "idle" not in out
    assert "--trace" not in out


def test_show_refuses_files_that_it_could_not_write_before_printing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    report().write(path)
    for argument, file, said in (
        ("--trace", str(tmp_path / "none" / "a.json"), "--trace: cannot write"),
        ("--png", "batch.jpg", "--png: 'batch.jpg' is another kind of file: its name must end in .png"),
        ("--svg", "batch.png", "--svg: 'batch.png' is another kind of file: its name must end in .svg"),
    ):
        assert show(str(path), argument, file) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
        assert err.count("\n") == 1


def test_an_argument_of_another_command_is_one_line_that_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        show("report.json", "--json")
    assert ended.value.code == 2
    line = "tf-adapters show: unrecognized arguments: --json; see tf-adapters show --help\n"
    assert capsys.readouterr() == ("", line)
