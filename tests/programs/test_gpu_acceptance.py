"""The acceptance on GPUs, where there is none: every part is skipped with a reason, and runs on CPUs in tiny sizes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pools import PRELOAD

from benchmarks.gpu import acceptance as gpu
from benchmarks.gpu.parts import Check, Options, Part
from benchmarks.shared.files import ROOT, result_file
from tf_adapters.testing import RankPool
from tf_adapters.testing.ranks import HANG_S

STARTED = "recompilations"
"""The part that is started as a script; the others' ranks are forked from a process that has imported everything."""
PAGE = "before\n<!-- gpu: x -->\nold\n<!-- end of gpu -->\n<!-- one-gpu: x -->\n<!-- end of one-gpu -->\nafter\n"
WITHOUT_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Arguments that keep results and page in a folder of the test's own."""
    (tmp_path / "page.md").write_text(PAGE)
    return ["--results", str(tmp_path / "results.json"), "--page", str(tmp_path / "page.md")]


def results(files: list[str]) -> dict[str, dict[str, Any]]:
    return json.loads(Path(files[1]).read_text())


def given(monkeypatch: pytest.MonkeyPatch, checks: list[Check] | None) -> list[int]:
    """Every part becomes one that counts its runs and has these checks; None: it lacks something."""
    ran: list[int] = []

    def run_part(part: Part, options: Options, left_s: float) -> dict[str, Any]:
        ran.append(1)
        if checks is None:
            return {"status": "skipped", "reason": "no CUDA device"}
        failed = any(check.passed is False for check in checks)
        listed = [asdict(check) | {"passed": check.passed} for check in checks]
        return {"status": "failed" if failed else "passed", "checks": listed, "on": {"gpu": "a GPU"}}

    monkeypatch.setattr(gpu, "run_part", run_part)
    return ran


# --- the command ---------------------------------------------------------------------------------------------


@WITHOUT_A_GPU
def test_without_a_gpu_every_part_is_skipped_with_a_reason(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(files) == 0
    found = results(files)["cuda"]
    assert found == {name: {"status": "skipped", "reason": "no CUDA device"} for name in gpu.MODULES}
    page = Path(files[3]).read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert page.count("not run: no CUDA device") == len(gpu.MODULES)
    assert capsys.readouterr().out.count("skipped: no CUDA device") == len(gpu.MODULES)


def test_a_part_that_has_its_result_is_not_run_again(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    ran = given(monkeypatch, [Check("a figure", 1.0, most=2.0)])
    assert gpu.main([*files, "--part", "memory"]) == 0
    assert gpu.main([*files, "--part", "memory"]) == 0
    assert len(ran) == 1
    assert gpu.main([*files, "--part", "memory", "--again"]) == 0
    assert len(ran) == 2
    assert "1 of 1 checks passed, on a GPU" in Path(files[3]).read_text()


def test_a_machine_without_a_gpu_takes_no_result_away(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    given(monkeypatch, [Check("a figure", 1.0, most=2.0)])
    gpu.main([*files, "--part", "memory"])
    before = results(files)
    given(monkeypatch, None)
    assert gpu.main([*files, "--part", "memory", "--again"]) == 0
    assert results(files) == before


def test_a_part_that_was_skipped_runs_once_it_can(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    given(monkeypatch, None)
    gpu.main([*files, "--part", "memory"])
    given(monkeypatch, [Check("a figure", 1.0)])
    gpu.main([*files, "--part", "memory"])
    assert results(files)["cuda"]["memory"]["status"] == "passed"


def test_a_check_that_failed_is_the_exit_status_and_is_shown(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    given(monkeypatch, [Check("a figure", 3.0, "%", most=2.0), Check("another", 1.0, least=1.0), Check("shown", 9.0)])
    assert gpu.main([*files, "--part", "memory"]) == 1
    assert "1 of 2 checks passed; a figure 3%" in Path(files[3]).read_text()
    assert gpu.main([*files, "--part", "memory"]) == 1  # also from its result


def late(options: Options) -> Iterator[Check]:
    """A part that yields a figure twice, then fails."""
    yield Check("a figure", 1.0, most=2.0)
    yield Check("a figure", 1.5, most=2.0)
    raise RuntimeError("the device is gone")


@pytest.mark.programs
def test_a_part_that_fails_keeps_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "RankPool", partial(RankPool, preload=PRELOAD))
    record = gpu.run_part(Part("late", late, lambda options: None), Options("cpu", tiny=True))
    assert record["status"] == "failed"
    assert "the device is gone" in record["reason"]
    assert [check["value"] for check in record["checks"]] == [1.5]


def test_without_time_left_a_part_does_not_start() -> None:
    record = gpu.run_part(Part("late", late, lambda options: None), Options("cpu", tiny=True), left_s=5.0)
    assert record == {"status": "skipped", "reason": "no time is left"}


def test_parts_in_order_of_value_fit_a_quarter_of_an_hour() -> None:
    first = list(gpu.MODULES)[:5]
    assert first == ["probe", "pipeline-one-gpu", "hot-path", "memory", "backward-time"]
    assert sum(gpu.part_of(name).minutes for name in first) <= 15


def test_the_page_says_how_many_cases_were_left_out(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    given(monkeypatch, [Check("fp8: not run", 1.0, note="no Transformer Engine"), Check("a figure", 1.0, most=2.0)])
    gpu.main([*files, "--part", "oracle"])
    assert "1 of 1 checks passed; 1 cases not run" in Path(files[3]).read_text()


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (Check("shown", 5.0), None),
        (Check("small", 1.0, most=2.0), True),
        (Check("large", 3.0, most=2.0), False),
        (Check("between", 0.0, most=2.0, least=-2.0), True),
        (Check("below", -3.0, most=2.0, least=-2.0), False),
        (Check("no number", math.nan, most=2.0), False),
    ],
    ids=lambda value: value.name if isinstance(value, Check) else "",
)
def test_a_check_is_held_against_its_limits(check: Check, passed: bool | None) -> None:
    assert check.passed is passed


@pytest.mark.parametrize("name", gpu.MODULES)
def test_what_a_part_lacks_is_said_before_anything_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = gpu.part_of(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert part.missing(Options("cuda")) == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert part.missing(Options("cuda")) in (
        None,
        "one GPU only",
        "deepspeed is not installed",
        "megatron is not installed",
    )


def test_the_page_shows_the_committed_results() -> None:
    results, page = gpu.read(result_file("gpu/acceptance.json")), (ROOT / "docs" / "gpu.md").read_text()
    assert gpu.table(results) in page
    assert gpu.one_gpu_table(results) in page


def test_the_page_tells_of_every_part() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert all(page.count(f"| `{name}` |") == 2 for name in gpu.MODULES)


@pytest.mark.parametrize("page", ["deepspeed", "megatron", "torch_pipelining"])
def test_a_support_table_says_what_was_tested_read_or_refused(page: str) -> None:
    """And nothing else: the cells of a guide's table under "What works"."""
    text = (ROOT / "docs" / f"{page}.md").read_text().split("\n## What works\n")[1].split("\n## ")[0]
    table = next(part for part in text.split("\n\n") if part.startswith("|"))
    cells = [cell.strip() for row in table.splitlines()[2:] for cell in row.strip("|").split("|")[1:]]
    assert cells
    for cell in cells:
        assert cell.split(",")[0].split(":")[0] in ("tested on CPU", "tested on GPU", "read", "refused"), cell


# --- the parts -----------------------------------------------------------------------------------------------


@pytest.mark.programs
@pytest.mark.parametrize("name", [name for name in gpu.MODULES if name != STARTED])
def test_a_part_runs_on_cpus(name: str, files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "RankPool", partial(RankPool, preload=PRELOAD))
    assert gpu.main(["--device", "cpu", "--tiny", "--part", name, *files]) == 0
    check_passed(files, name)


@pytest.mark.programs
def test_a_part_runs_on_cpus_as_a_user_starts_it(files: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.acceptance", "--device", "cpu", "--tiny", "--part", STARTED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *files], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_passed(files, STARTED)


def check_passed(files: list[str], name: str) -> None:
    record = results(files)["cpu, tiny"][name]
    assert record["status"] == "passed"
    assert record["checks"]
    assert all(math.isfinite(check["value"]) for check in record["checks"])
