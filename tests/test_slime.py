"""slime's own training with Megatron and freezing, on two ranks over gloo, from a checkout; see ``slime_jobs``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from forked_jobs import outcomes_of

from tf_adapters.report import Report

_SOURCES = ("SLIME_SOURCE", "MEGATRON_LM_SOURCE")
pytestmark = [
    pytest.mark.skipif(
        any(name not in os.environ for name in _SOURCES),
        reason="SLIME_SOURCE and MEGATRON_LM_SOURCE name no checkouts of slime and Megatron-LM",
    ),
    pytest.mark.distributed,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slime")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> list[dict[str, Any]]:
    outcomes = outcomes_of("slime_jobs", folder, timeout_s=280)
    for of_rank in outcomes:
        for name, outcome in of_rank.items():
            assert bool(outcome["error"]) == (name == "wrong setting"), (name, outcome["error"])
            assert outcome["restored"], name
    return outcomes


def test_with_nothing_frozen_it_trains_as_slime_alone(jobs: list[dict[str, Any]]) -> None:
    assert jobs[1]["nothing frozen"]["losses"] == jobs[1]["alone"]["losses"]
    assert len(jobs[1]["alone"]["losses"]) == 12


def test_it_freezes_to_the_end_and_logs_with_slime(jobs: list[dict[str, Any]], folder: Path) -> None:
    report = Report.read(folder / "run" / "timely_freeze" / "report.json")
    assert report.status == "stable"
    assert any(any(shares) for shares in report.frozen_share.values())
    figures = jobs[1]["whole"]["figures"]["11"]
    assert 0.0 <= figures["train/timely_freeze_afr_stage_0"] <= 1.0


def test_a_resumed_run_repeats_the_uninterrupted_one(jobs: list[dict[str, Any]]) -> None:
    whole, resumed = jobs[1]["whole"]["losses"], jobs[1]["resumed"]["losses"]
    assert sorted(map(int, resumed)) == [9, 10, 11]
    assert all(whole[step] == loss for step, loss in resumed.items())


def test_a_critic_reports_in_a_folder_of_its_own(jobs: list[dict[str, Any]], folder: Path) -> None:
    assert (folder / "critic" / "critic" / "timely_freeze" / "report.json").exists()
    assert any(name.startswith("train/critic-timely_freeze") for name in jobs[1]["critic"]["figures"]["2"])


def test_a_wrong_setting_is_one_line_on_all_ranks(jobs: list[dict[str, Any]]) -> None:
    for of_rank in jobs:
        line = of_rank["wrong setting"]["error"]
        assert "max_freeze_ratio is 6" in line
        assert "\n" not in line
