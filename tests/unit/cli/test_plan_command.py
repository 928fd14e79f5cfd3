from __future__ import annotations

import io
import json
import os
import stat
import time

import pytest

from tf_adapters.cli import main, progress
from tf_adapters.cli import plan as plan_cli
from tf_adapters.errors import SolverError
from tf_adapters.planner.freeze_plan import FreezePlan

GOOD = {
    "ranks": [["0F0", "0B0"]],
    "times": {"0F0": [1.0, 1.0], "0B0": [1.0, 2.0]},
    "max_freeze_ratio": 0.5,
}


def run(*arguments: str) -> int:
    return main(["plan", *arguments])


@pytest.fixture
def given(tmp_path):
    def write(content) -> str:
        path = tmp_path / "input.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write


def test_prints_the_plan(given, capsys):
    assert run(given(GOOD)) == 0
    out, err = capsys.readouterr()
    made = FreezePlan.from_json(json.loads(out))
    assert made.makespan_ms.planned == pytest.approx(2.5)
    assert err == ""


def test_reads_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(GOOD)))
    assert run("-") == 0
    assert json.loads(capsys.readouterr().out)["freeze_ratio"] == {"0B0": pytest.approx(0.5)}


def test_writes_the_plan_and_prints_one_line(given, tmp_path, capsys):
    out = tmp_path / "plan.json"
    out.write_text("old")
    assert run(given(GOOD), "--out", str(out)) == 0
    assert json.loads(out.read_text())["makespan_ms"]["planned"] == pytest.approx(2.5)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "batch 3 -> 2.5 ms" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input.json", "plan.json"]


@pytest.mark.skipif(os.name != "posix", reason="permission bits")
def test_the_plan_has_an_ordinary_files_permissions(given, tmp_path):
    out, ordinary = tmp_path / "plan.json", tmp_path / "ordinary"
    ordinary.write_text("")
    assert run(given(GOOD), "--out", str(out)) == 0
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


WRONG = {
    "no json": ('{"ranks":\n nope}', "not JSON: Expecting value at line 2"),
    "empty": ("", "not JSON: Expecting value at line 1"),
    "nan": ('{"max_freeze_ratio": NaN}', "NaN is not JSON"),
    "infinity": ('{"max_freeze_ratio": -Infinity}', "-Infinity is not JSON"),
    "overflow": (json.dumps(GOOD).replace("2.0", "1e999"), "times['0B0'][1]: inf is not a finite time"),
    "key twice": ('{"ranks": [], "ranks": []}', "field 'ranks' is there twice"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "long number": (f'{{"max_freeze_ratio": {"1" * 5000}}}', "not JSON: Exceeds the limit"),
    "a list": ([], "the input is []"),
    "misspelt": (GOOD | {"comunication": {}}, "did you mean 'communication'?"),
    "ratio": (GOOD | {"max_freeze_ratio": 2}, "max_freeze_ratio: 2 is not a number from 0 to 1"),
    "deadlock": (GOOD | {"ranks": [["0B0", "0F0"]]}, "ranks: 0B0 comes before 0F0"),
    "line break in a name": (GOOD | {"a\nb": 1}, "unknown field 'a\\nb'"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_ends_with_2_and_one_line(given, capsys, content, message):
    assert run(given(content)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("tf-adapters plan: ")


def test_unreadable_files_end_with_2_and_one_line(tmp_path, capsys):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in ((tmp_path / "absent", "No such file"), (tmp_path, "directory"), (binary, "UTF-8")):
        assert run(str(path)) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_a_place_that_cannot_be_written_ends_with_2_and_one_line(given, tmp_path, capsys):
    assert run(given(GOOD), "--out", str(tmp_path / "absent" / "plan.json")) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "folder").mkdir()
    assert run(given(GOOD), "--out", str(tmp_path / "folder")) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "input.json"]


def test_a_device_is_written_to_and_not_replaced(given, tmp_path):
    pipe, real = tmp_path / "pipe", tmp_path / "real.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert run(given(GOOD), "--out", str(pipe)) == 0
    assert json.loads(os.read(reader, 1 << 16))["solver"]["status"] == "OPTIMAL"
    os.close(reader)
    link = tmp_path / "link.json"
    link.symlink_to(real)
    assert run(given(GOOD), "--out", str(link)) == 0
    assert link.is_symlink()
    assert real.is_file()


def test_a_failing_solver_ends_with_1_and_one_line(given, capsys, monkeypatch):
    def fail(*_, **__):
        raise SolverError("GLOP ended ABNORMAL while looking for the least freezing")

    monkeypatch.setattr(plan_cli, "plan_from_json", fail)
    assert run(given(GOOD)) == 1
    assert capsys.readouterr().err.endswith("GLOP ended ABNORMAL while looking for the least freezing\n")


def test_help_and_version(capsys):
    for arguments, words in ((["plan", "--help"], "INPUT.json"), (["--version"], "tf-adapters 0.")):
        cli = pytest.importorskip("tf_adapters.cli")
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        assert words in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(stream: io.StringIO, monkeypatch) -> str:
    """What is printed while a text of 200 characters is worked on, until something is, at most ten seconds."""
    monkeypatch.setattr("sys.stderr", stream)
    shown = progress.ProgressLine("tf-adapters plan")
    shown("step " * 40)
    with shown:
        for _ in range(1000):
            if stream.getvalue():
                break
            time.sleep(0.01)
    return stream.getvalue()


def test_progress_is_one_line_that_is_erased(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    shown = work(Terminal(), monkeypatch)
    first, *_, last = shown.split("\r")[1:-1]
    assert first.startswith("tf-adapters plan: 0 s, step step")
    assert len(first) == len(last) == progress._COLUMNS
    assert last.strip() == ""
    assert "\n" not in shown


def test_progress_is_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    assert work(io.StringIO(), monkeypatch) == f"tf-adapters plan: 0 s, {'step ' * 40}\n"


def test_quick_work_shows_no_progress(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with progress.ProgressLine("tf-adapters plan") as shown:
        shown("step 1")
    assert stream.getvalue() == ""
