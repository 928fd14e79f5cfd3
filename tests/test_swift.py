"""ms-swift's own Megatron trainer with freezing, on two ranks over gloo; see ``swift_jobs``."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from forked_jobs import outcomes_of

from tf_adapters.report import Report


def _is_installed() -> bool:
    try:
        return bool(metadata.version("ms-swift"))
    except metadata.PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(not _is_installed(), reason="ms-swift is not installed"),
    pytest.mark.distributed,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("swift")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> list[dict[str, Any]]:
    outcomes = outcomes_of("swift_jobs", folder, timeout_s=280)
    for of_rank in outcomes:
        for name, outcome in of_rank.items():
            assert bool(outcome["error"]) == (name == "wrong setting"), (name, outcome["error"])
    return outcomes


def losses(outcome: dict[str, Any]) -> dict[str, float]:
    return {step: logs["loss"] for step, logs in outcome["logged"].items()}


def test_with_nothing_frozen_it_trains_as_ms_swift_alone(jobs: list[dict[str, Any]]) -> None:
    assert losses(jobs[1]["nothing frozen"]) == losses(jobs[1]["alone"])
    assert len(losses(jobs[1]["alone"])) == 12


def test_it_freezes_to_the_end_and_logs_with_ms_swift(jobs: list[dict[str, Any]], folder: Path) -> None:
    report = Report.read(folder / "run" / "timely_freeze" / "report.json")
    assert report.status == "stable"
    assert any(any(shares) for shares in report.frozen_share.values())
    assert 0.0 <= jobs[1]["whole"]["logged"]["12"]["timely_freeze/afr_stage_0"] <= 1.0
    assert jobs[0]["whole"]["detached"]


def test_a_resumed_run_repeats_the_uninterrupted_one(jobs: list[dict[str, Any]]) -> None:
    whole, resumed = losses(jobs[1]["whole"]), losses(jobs[1]["resumed"])
    assert sorted(map(int, resumed)) == [9, 10, 11, 12]
    assert all(whole[step] == loss for step, loss in resumed.items())


def test_a_wrong_setting_is_one_line_on_all_ranks(jobs: list[dict[str, Any]]) -> None:
    for of_rank in jobs:
        line = of_rank["wrong setting"]["error"]
        assert "max_freeze_ratio is 6" in line
        assert "\n" not in line
