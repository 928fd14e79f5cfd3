"""``tf-adapters simulate``: every source of times, several schedules, files, and one line for every wrong argument."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_reports import report

from tf_adapters.cli import main
from tf_adapters.errors import SolverError
from tf_adapters.testing.ranks import HANG_S

GIVEN = ("--forward-ms", "10", "--backward-ms", "20")
SIZE = ("--stages", "2", "--microbatches", "2")
INPUT = {
    "ranks": [["0F0", "0B0"], ["1F0", "1B0"]],
    "times": {"0F0": [10, 10], "0B0": [10, 20], "1F0": [10, 10], "1B0": [10, 20]},
    "communication": {"0F0->1F0": 5.0},
    "max_freeze_ratio": 0.5,
}


def run(*arguments: str) -> int:
    return main(["simulate", *arguments])


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run(*arguments, "--json") == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["simulations"]
    return found


def test_given_times_are_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    """GPipe, two stages and microbatches: 90 ms, 60 with everything frozen.

    Budget 0.5 is one whole backward for each stage: 1B0 or 1B1, and 0B1, which ends the batch: 70; 60 with 0B1 gone.
    """
    assert run("--schedule", "gpipe", *SIZE, *GIVEN, "--max-freeze-ratio", "0.5", "--sweep", "1") == 0
    out = capsys.readouterr().out
    headline = "gpipe: 2 stages on 2 ranks, 2 microbatches: batch 90.0 ms -> 70.0 ms at r_max 0.5, +28.6%"
    assert out.splitlines()[0] == headline
    for words in (
        "60.0 ms, +50.0%: where all of stage 0 is frozen",
        "90.0 ms, bubble 33.3%",
        "50.0 ms, +80.0% throughput, stable, at any r_max, held by stage",
        "Freeze ratio by stage and microbatch, %",
        "Other r_max",
        "rank 1 ",
    ):
        assert words in out


def test_one_value_per_stage_and_a_weight_share(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = simulated(
        capsys,
        *("--schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--sweep", "none"),
        *("--forward-ms", "1,2", "--backward-ms", "3,4", "--weight-share", "0.5,0.25"),
    )
    assert found["unfrozen"]["rank_busy_ms"] == pytest.approx([8.0, 12.0])
    assert found["most"]["rank_busy_ms"] == pytest.approx([5.0, 10.0])
    assert found["sweep"] == []


def test_communication_is_on_edges_between_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    one = simulated(capsys, "--schedule", "gpipe", *SIZE, *GIVEN)
    other = simulated(capsys, "--schedule", "gpipe", *SIZE, *GIVEN, "--communication-ms", "2")
    assert other[0]["unfrozen"]["ms"] == pytest.approx(one[0]["unfrozen"]["ms"] + 4.0)


def test_stages_are_the_whole_pipelines_and_ranks_are_where_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (by_stage,) = simulated(capsys, "--schedule", "zbv", "--stages", "4", "--microbatches", "4", *GIVEN)
    assert (by_stage["ranks"], by_stage["stages"]) == (2, 4)
    assert by_stage["unfrozen"]["rank_busy_ms"] == pytest.approx([2 * 4 * 30.0] * 2)
    (by_rank,) = simulated(capsys, "--schedule", "zbv", "--ranks", "2", "--microbatches", "4", *GIVEN)
    assert (by_rank["ranks"], by_rank["stages"]) == (2, 4)
    assert by_rank["unfrozen"]["rank_busy_ms"] == pytest.approx([4 * 30.0] * 2)
    (three,) = simulated(
        capsys, "--schedule", "interleaved", "--stages", "6", "--ranks", "2", "--microbatches", "4", *GIVEN
    )
    assert (three["ranks"], three["stages"]) == (2, 6)


def test_schedules_side_by_side_do_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--schedule", "all", "--ranks", "2", "--microbatches", "4", *GIVEN)
    found = simulated(capsys, *arguments)
    assert [each["name"] for each in found] == [
        *("gpipe", "1f1b", "interleaved", "zbv", "interleaved-zero-bubble", "dualpipev", "looped-bfs")
    ]
    for each in found:
        assert sum(each["unfrozen"]["rank_busy_ms"]) == pytest.approx(2 * 4 * 30.0)
    assert run(*arguments, "--sweep", "1") == 0
    out = capsys.readouterr().out
    assert "7 schedules at r_max 0.8" in out
    assert "held by" in out
    assert "different numbers of ranks" not in out


def test_different_numbers_of_ranks_are_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--schedule", "1f1b,zbv", "--stages", "4", "--microbatches", "4", *GIVEN) == 0
    assert "different numbers of ranks (2, 4): give --ranks" in capsys.readouterr().out


def test_a_model_that_is_cut_anew_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--stages", "4", "--ranks", "2", "--microbatches", "4")
    assert (
        run("--schedule", "1f1b,zbv", *sizes, "--forward-ms", "1,2,3,4", "--backward-ms", "2", "--sweep", "none") == 0
    )
    out = capsys.readouterr().out
    assert "note: 1f1b runs 2 stages on 2 ranks, not 4: the model is cut anew" in out
    assert "zbv runs" not in out


def test_a_models_shape_gives_the_predicted_gain(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/predicted.md: LLaMA-3-8B under GPipe on 4 ranks with 8 microbatches: plan 38.6, stable 44.0%."""
    model = ("--schedule", "gpipe", "--ranks", "4", "--microbatches", "8", "--model", "llama-8b", "--sweep", "none")
    (found,) = simulated(capsys, *model)
    assert found["planned"]["gain"] == pytest.approx(0.386, abs=5e-4)
    assert found["planned"]["stable_gain"] == pytest.approx(0.440, abs=5e-4)


def test_a_report_is_simulated_with_its_own_times_and_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    report(config={"max_freeze_ratio": 1.0}).write(path)
    (own,) = simulated(capsys, str(path))
    assert own["max_freeze_ratio"] == 1.0
    assert own["unfrozen"]["ms"] == pytest.approx(90.0)
    assert own["planned"]["ms"] == pytest.approx(60.0)
    own, other = simulated(capsys, str(path), "--schedule", "gpipe", "--r-max", "0.5")
    assert (own["name"], other["name"]) == ("recorded", "gpipe")
    assert (other["ranks"], other["microbatches"], other["max_freeze_ratio"]) == (2, 2, 0.5)
    assert other["unfrozen"]["ms"] == pytest.approx(90.0)


def test_a_reports_own_promise_is_shown_beside_the_simulated_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    report(measured={"step_ms_unfrozen": 120.0, "planned_step_ms": 95.5}).write(path)
    assert run(str(path)) == 0
    assert "the run's own plan promises 95.5 ms: it runs each monitored step again" in capsys.readouterr().out


def test_a_measured_step_keeps_what_is_no_pipeline_computation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At r_max 1 the batch falls from 90 to 60 ms, 50 with 0B1 gone: a step of 100 ms to 60."""
    path = tmp_path / "report.json"
    report(measured={"step_ms_unfrozen": 100.0}).write(path)
    assert run(str(path), "--r-max", "1") == 0
    assert "100.0 ms measured with nothing frozen, 60.0 ms expected in stable" in capsys.readouterr().out


def test_the_planners_input_is_simulated_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "input.json"
    path.write_text(json.dumps(INPUT), encoding="utf-8")
    (found,) = simulated(capsys, "--input", str(path))
    assert found["unfrozen"]["ms"] == pytest.approx(65.0)
    assert found["planned"]["ms"] == pytest.approx(55.0)
    (other,) = simulated(capsys, "--input", str(path), "--communication-ms", "0")
    assert other["unfrozen"]["ms"] == pytest.approx(60.0)


def test_a_csv_file_in_torchs_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "order.csv"
    path.write_text("0UNSHARD,0F0,0SEND_F0,,0F1,(0B0;0B1)OVERLAP_F_B,0REDUCE_GRAD\n1RECV_F0,1F0,1F1,1B0,1B1\n")
    (found,) = simulated(capsys, "--csv", str(path), *GIVEN)
    assert (found["ranks"], found["microbatches"]) == (2, 2)
    assert found["unfrozen"]["ms"] == pytest.approx(90.0)


def test_pictures_and_a_trace_are_written_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    png, svg, trace = (tmp_path / name for name in ("a.png", "a.svg", "a.json"))
    files = ("--png", str(png), "--svg", str(svg), "--trace", str(trace))
    assert run("--schedule", "gpipe", *SIZE, *GIVEN, "--no-gantt", *files) == 0
    out = capsys.readouterr().out
    for path, start in ((png, b"\x89PNG"), (svg, b"<?xml")):
        assert path.read_bytes().startswith(start)
        assert f"picture: {path}" in out
    names = [e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert names == ["nothing frozen", "planned at r_max 0.8, 80% of the weight gradients skipped"]
    assert "idle" not in out


BASE = ("--schedule", "gpipe", *SIZE, *GIVEN)
WRONG = {
    "no times": (("--schedule", "gpipe", *SIZE), "no times: give a run's REPORT.json"),
    "two sources": ((*BASE, "--model", "llama-8b"), "--forward-ms and --model: give one of them"),
    "no backward": (("--forward-ms", "1"), "--backward-ms: missing"),
    "backward alone": (("--model", "llama-8b", "--backward-ms", "1"), "--backward-ms 1: goes with --forward-ms"),
    "length alone": ((*BASE, "--length", "9"), "--length 9: goes with --model, not with --forward-ms"),
    "no schedule": ((*SIZE, *GIVEN), "--schedule: missing"),
    "schedule": ((*SIZE, *GIVEN, "--schedule", "gpipe,2f2b"), "--schedule '2f2b': allowed are gpipe, 1f1b"),
    "no microbatches": (("--schedule", "gpipe", "--stages", "2", *GIVEN), "--microbatches: missing"),
    "no stages": (("--schedule", "gpipe", "--microbatches", "2", *GIVEN), "--stages: missing"),
    "microbatches": ((*BASE, "--microbatches", "0"), "--microbatches '0': expected a whole number from 1"),
    "huge": ((*BASE, "--microbatches", "9" * 5000), "expected a whole number from 1"),
    "ranks": ((*BASE, "--ranks", "two"), "--ranks 'two': expected a whole number"),
    "too large": ((*BASE, "--microbatches", "999999"), "2 stages x 999999 microbatches: at most 100000"),
    "odd": (("--schedule", "zbv", "--stages", "3", "--microbatches", "4", *GIVEN), "--stages 3: --schedule zbv with 2"),
    "not of ranks": (
        ("--schedule", "zbv", "--stages", "5", "--ranks", "2", "--microbatches", "4", *GIVEN),
        "--stages 5: --schedule zbv on --ranks 2 needs a multiple of 2",
    ),
    "three sizes": (
        (
            *GIVEN,
            *("--schedule", "zbv", "--stages", "8", "--ranks", "2", "--stages-per-rank", "2", "--microbatches", "4"),
        ),
        "--stages 8: --ranks 2 with --stages-per-rank 2 are 4",
    ),
    "one each": ((*BASE, "--stages-per-rank", "2"), "--stages-per-rank 2: gpipe: one stage on each rank"),
    "torch refuses": (
        ("--schedule", "dualpipev", "--ranks", "4", "--microbatches", "4", *GIVEN),
        "--schedule dualpipev: 4 microbatches: DualPipeV needs",
    ),
    "values": ((*BASE, "--forward-ms", "1,2,3"), "--forward-ms: 3 values: expected one, or 2 for --stages 2"),
    "no number": ((*BASE, "--forward-ms", "1,x"), "--forward-ms 'x': expected a finite time in ms"),
    "nan": ((*BASE, "--backward-ms", "nan"), "--backward-ms 'nan': expected a finite time"),
    "negative": ((*BASE, "--communication-ms", "-1"), "--communication-ms '-1': expected a finite time"),
    "sums": ((*BASE, "--forward-ms", "1e308"), "times: they add up to more than a float holds"),
    "share": ((*BASE, "--weight-share", "1.5"), "--weight-share '1.5': expected a number from 0 to 1"),
    "ratio": ((*BASE, "--r-max", "80"), "--max-freeze-ratio '80': expected a number from 0 to 1"),
    "sweep": ((*BASE, "--sweep", "0.5,2"), "--sweep '2': expected a number from 0 to 1"),
    "model": (("--model", "gpt-2", "--schedule", "gpipe"), "--model 'gpt-2': allowed are llama-1b"),
    "too few layers": (
        ("--model", "llama-1b", "--schedule", "gpipe", "--ranks", "40", "--microbatches", "40"),
        "--model llama-1b: 16 layers on 40 stages",
    ),
    "no report": (("none.json",), "none.json: there is no such file"),
    "no input": (("--input", "none.json"), "cannot read none.json"),
    "no csv": ((*GIVEN, "--csv", "none.csv"), "--csv none.csv: cannot be read"),
    "csv has sizes": ((*GIVEN, "--csv", "x.csv", "--ranks", "2"), "the file of --csv says them"),
    "no folder": ((*BASE, "--png", "none/a.png"), "--png: cannot write none/a.png: the folder none does not exist"),
    "a folder": ((*BASE, "--trace", "."), "--trace: '.' is not a file's name"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_end_with_2_and_one_line(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tf-adapters simulate: ")
    assert message in err
    assert err.count("\n") == 1
    assert len(err) < 300 or "huge" in message or "9999" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0Z0\n", "line 1, cell 2: '0Z0' is not an action"),
        ("0F0\n", "0F0 has no backward"),
        ("", "the schedule has no actions"),
    ],
)
def test_a_wrong_csv_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "order.csv"
    path.write_text(text)
    assert run("--csv", str(path), *GIVEN) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"times": {}, "plan": None, "status": "warmup"}, (), "no action has been timed yet (status 'warmup')"),
        ({}, ("--stages", "4", "--schedule", "gpipe"), "--stages 4: recorded times have their stages (2)"),
        ({}, ("--ranks", "4"), "the recorded schedule has its own; add --schedule for another"),
        ({}, ("--schedule", "gpipe", "--ranks", "3"), "times of 2 stages cannot become those of 3"),
        ({"schedule": {"ranks": [["0F0"]]}}, (), "0F0 has no backward"),
    ],
)
def test_what_a_report_cannot_give_is_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    path = tmp_path / "report.json"
    report(**changes).write(path)
    assert run(str(path), *arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_an_argument_without_its_value_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*BASE, "--csv")
    assert ended.value.code == 2
    said = "tf-adapters simulate: argument --csv: expected one argument; see tf-adapters simulate --help\n"
    assert capsys.readouterr().err == said


def test_a_failing_solver_ends_with_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SolverError("GLOP ended ABNORMAL while looking for the least freezing")

    monkeypatch.setattr("tf_adapters.simulate.simulation.solve", fail)
    assert run(*BASE) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "tf-adapters simulate: GLOP ended ABNORMAL while looking for the least freezing\n"


def test_help_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for name in ("gpipe", "1f1b", "interleaved", "zbv", "interleaved-zero-bubble", "dualpipev", "looped-bfs"):
        assert name in out


def test_the_command_line_starts_without_the_heavy_packages() -> None:
    check = (
        "import sys, tf_adapters.cli; tf_adapters.cli.build_parser();"
        " sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'ortools', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=HANG_S).returncode == 0


DEFERRED = ("--schedule", "1f1b", "--ranks", "4", "--microbatches", "8", "--forward-ms", "10", "--backward-ms", "22")
SHARE = ("--weight-share", str(10 / 22), "--sweep", "none", "--max-freeze-ratio", "0.8")


def test_deferral_shows_the_hosts_order_the_exact_one_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*DEFERRED, *SHARE, "--defer", "--extra-microbatches", "4") == 0
    out = capsys.readouterr().out
    assert "exact:        286.0 ms, +23.1% throughput" in out
    assert " at any r_max without deferral, held by " in out
    rows = [line for line in out.splitlines() if ": " in line and ", bubble " in line and "ms" in line]
    assert [line.split(":")[0] for line in rows if not line.startswith(("before", "planned:"))] == [
        "nothing frozen",
        "exact",
        "planned at r_max 0.8, 40% of the weight gradients skipped",
    ]
    (found,) = simulated(capsys, *DEFERRED, *SHARE, "--defer", "--extra-microbatches", "4")
    assert found["exact"]["gain"] == pytest.approx(352.0 / 286.0 - 1.0)
    assert found["plan"]["makespan_ms"]["host"] == pytest.approx(352.0)
    assert found["planned"]["ms"] == pytest.approx(found["plan"]["makespan_ms"]["planned"])
    assert any("W" in action for row in found["plan"]["ranks"] for action in row)


def test_a_deferred_plan_can_beat_everything_frozen_in_the_schedules_own_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--ranks", "4", "--microbatches", "8", "--model", "llama-8b", "--sweep", "none", "--defer")
    _, zbv = simulated(capsys, "--schedule", "1f1b,zbv", *sizes)
    assert zbv["planned"]["gain"] > zbv["most"]["gain"]
    assert run("--schedule", "1f1b,zbv", *sizes) == 0
    assert "with everything frozen, which no r_max can beat without deferral\n" in capsys.readouterr().out


def test_without_deferral_there_is_no_exact_row(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = simulated(capsys, *DEFERRED, *SHARE)
    assert "exact" not in found


def test_a_report_of_a_run_that_defers_is_simulated_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    report(config={"weight_gradients": "deferred", "extra_microbatches": 1}).write(path)
    (found,) = simulated(capsys, str(path))
    assert "exact" in found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--extra-microbatches", "2"), "--extra-microbatches 2: goes with --defer"),
        (("--defer", "--extra-microbatches", "-1.5"), "'-1.5': expected a whole number from -1000000 to 1000000"),
    ],
)
def test_wrong_deferral_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    assert run(*DEFERRED, *arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
