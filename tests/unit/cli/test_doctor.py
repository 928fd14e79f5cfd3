"""``tf-adapters doctor`` judges a table of versions; the tables here are made up."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from tf_adapters.cli import doctor
from tf_adapters.cli.doctor import HOSTS, TRAINERS, diagnose, interrupted_builds, render

TORCH = "torch.distributed.pipelining"
GOOD: dict[str, str | None] = {
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "ortools": "9.15.6755",
    "pydantic": "2.14.3",
    "scipy": "1.17.1",
    "deepspeed": "0.19.8",
    "megatron-core": None,
    "matplotlib": "3.11.2",
    "rich": "15.0.0",
}


def text(**changes: str | None) -> str:
    renamed = {name.replace("_", "-"): version for name, version in changes.items()}
    return render(diagnose({**GOOD, **renamed}), "CPU only")


def test_a_complete_installation_is_ready() -> None:
    diagnosis = diagnose(GOOD)
    assert diagnosis.ready == ("deepspeed", TORCH)
    assert diagnosis.problems == ()
    assert diagnosis.hints == ()
    assert text().splitlines()[-1] == f"ready for: deepspeed, {TORCH}"


def test_the_lock_of_a_killed_build_is_a_problem_that_names_the_line_that_mends_it(tmp_path: Path) -> None:
    old, new = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock", tmp_path / "py311_cpu" / "fused_adam" / "lock"
    for lock in (old, new):
        lock.parent.mkdir(parents=True)
        lock.touch()
    os.utime(old, (0, 0))
    locks = interrupted_builds(tmp_path)
    assert locks == (old,)
    assert interrupted_builds(tmp_path / "nowhere") == ()
    diagnosis = diagnose(GOOD, locks)
    assert diagnosis.ready == ()
    assert diagnosis.problems == (
        f"a build of deepspeed_shm_comm was killed, and training would wait for it forever: rm {old}",
    )


def test_without_deepspeed_it_names_the_line_that_installs_it() -> None:
    shown = text(deepspeed=None)
    assert diagnose({**GOOD, "deepspeed": None}).ready == (TORCH,)
    assert 'mend it: pip install "deepspeed>=0.19.3"' in shown


def test_without_any_host_it_is_not_ready_and_says_what_to_install() -> None:
    last = text(deepspeed=None, torch="2.12.1").splitlines()[-1]
    assert last.startswith("not ready: no host can be used; ")
    assert 'pip install "deepspeed>=0.19.3"' in last
    assert 'pip install --upgrade "torch>=2.13"' in last


@pytest.mark.parametrize("version", ["0.19.3", "0.19.3.post1", "0.19.7", "0.19.8", "0.19.8+abc"])
def test_versions_in_the_tested_range(version: str) -> None:
    host = diagnose({**GOOD, "deepspeed": version}).hosts[0]
    assert host.usable
    assert "in the tested range" in host.finding
    assert host.remedy == ""


@pytest.mark.parametrize("version", ["0.19.9", "0.20.0", "0.19.10", "1.0"])
def test_newer_than_tested_is_usable_and_says_so(version: str) -> None:
    host = diagnose({**GOOD, "deepspeed": version}).hosts[0]
    assert host.usable
    assert f"{version} is newer than what was tested" in host.finding
    assert f"deepspeed=={HOSTS[0].newest}" in host.finding


@pytest.mark.parametrize("version", ["0.18.9", "0.19.2", "0.9.5"])
def test_older_than_tested_is_not_usable(version: str) -> None:
    diagnosis = diagnose({**GOOD, "deepspeed": version})
    assert diagnosis.ready == (TORCH,)
    assert diagnosis.hosts[0].remedy == 'pip install --upgrade "deepspeed>=0.19.3"'


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"ortools": None}, 'ortools is not installed: pip install "ortools>=9.10"'),
        ({"ortools": "9.9.1"}, 'ortools 9.9.1 is too old: pip install --upgrade "ortools>=9.10"'),
        ({"scipy": "1.11.4"}, 'scipy 1.11.4 is too old: pip install --upgrade "scipy>=1.12"'),
        ({"python": "3.9.18"}, "Python 3.9.18 is too old: tf-adapters needs 3.10 or newer"),
    ],
)
def test_a_core_problem_keeps_every_host_from_working(changes: dict[str, str | None], line: str) -> None:
    diagnosis = diagnose({**GOOD, **changes})
    assert diagnosis.problems == (line,)
    assert diagnosis.ready == ()
    assert text(**changes).splitlines()[-1] == f"not ready: {line}"


def test_it_knows_every_package_that_the_project_needs() -> None:
    project = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    needed = project.split("dependencies = [", 1)[1].split("]", 1)[0].replace('"', "").replace(" ", "").split(",")
    assert {tuple(line.strip().split(">=")) for line in needed if line.strip()} == set(doctor._CORE.items())


def test_missing_extras_are_hints_only() -> None:
    diagnosis = diagnose({**GOOD, "matplotlib": None, "rich": None})
    assert diagnosis.ready == ("deepspeed", TORCH)
    assert diagnosis.hints == (
        "no matplotlib, so no Gantt charts: pip install matplotlib",
        "no rich, so no coloured tables: pip install rich",
    )


def test_every_host_that_is_installed_is_ready() -> None:
    assert diagnose({**GOOD, "megatron-core": "0.16.1"}).ready == ("deepspeed", "megatron-core", TORCH)
    assert diagnose({**GOOD, "deepspeed": None, "megatron-core": "0.19.2"}).ready == ("megatron-core", TORCH)
    assert "0.15.3 is too old (0.16.1 to 0.19.2 tested)" in text(megatron_core="0.15.3")


def test_trainers_are_judged_with_the_host_below_them() -> None:
    ready = diagnose({**GOOD, "megatron-core": "0.16.1", "ms-swift": "4.6.0", "nemo-automodel": "0.7.0"}).ready
    assert ready[-2:] == ("ms-swift", "NeMo AutoModel")
    without = diagnose({**GOOD, "ms-swift": "4.6.0"})
    assert "ms-swift" not in without.ready
    line = "ms-swift: 4.6.0, in the tested range (4.6.0 tested); it needs megatron-core, see above"
    assert line in text(ms_swift="4.6.0")
    assert "Megatron-Bridge: 0.2.0 is too old (0.3.1 tested)" in text(megatron_bridge="0.2.0")


def test_a_trainer_that_is_not_installed_is_nothing_to_mend() -> None:
    lines = text().splitlines()
    assert lines[lines.index("  Megatron-Bridge: not installed") + 1] == "  ms-swift: not installed"


@pytest.mark.parametrize(("torch", "code"), [("2.13.0", 0), ("2.12.1", 1)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], torch: str, code: int) -> None:
    monkeypatch.setattr(doctor, "installed_versions", lambda: {**GOOD, "deepspeed": None, "torch": torch})
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor"])
    assert args.run(args) == code
    assert "Devices" in capsys.readouterr().out


def test_looking_for_versions_imports_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    versions = doctor.installed_versions()
    assert versions["torch"] is not None
    assert {host.package for host in (*HOSTS, *TRAINERS)} <= versions.keys()
