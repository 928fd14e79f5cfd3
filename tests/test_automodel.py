"""NeMo AutoModel's own recipe with freezing, on two ranks over gloo: its settings, logs, checkpoints, losses."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forked_jobs import outcomes_of

from tf_adapters.report import Report

pytestmark = [
    pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="nemo-automodel is not installed"),
    pytest.mark.distributed,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("automodel")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> list[dict[str, Any]]:
    outcomes = outcomes_of("automodel_jobs", folder, timeout_s=280)
    for of_rank in outcomes:
        for name, outcome in of_rank.items():
            assert outcome["status"] == (2 if name in ("wrong setting", "deferred") else 0), (name, outcome["end"])
    return outcomes


def test_with_nothing_frozen_it_trains_as_automodel_alone(jobs: list[dict[str, Any]]) -> None:
    for of_rank in jobs:
        assert of_rank["nothing frozen"]["losses"] == of_rank["alone"]["losses"]
        assert len(of_rank["alone"]["losses"]) == 9


def test_it_freezes_to_the_end_and_logs_with_automodel(jobs: list[dict[str, Any]], folder: Path) -> None:
    report = Report.read(folder / "run" / "timely_freeze" / "report.json")
    assert report.status == "stable"
    assert any(any(shares) for shares in report.frozen_share.values())
    figures = jobs[0]["whole"]["figures"]["13"]
    assert 0.0 <= figures["timely_freeze/afr_stage_0"] <= 1.0
    assert figures["timely_freeze/planned_step_ms"] > 0.0


def test_a_resumed_job_repeats_the_uninterrupted_one(jobs: list[dict[str, Any]]) -> None:
    whole, resumed = jobs[0]["whole"]["losses"], jobs[0]["resumed"]["losses"]
    assert sorted(map(int, resumed)) == [10, 11, 12, 13]
    assert all(whole[step] == loss for step, loss in resumed.items())


def test_a_layer_that_the_loss_trains_is_never_frozen(jobs: list[dict[str, Any]]) -> None:
    usual, linear = jobs[0]["whole"]["units"]["1"], jobs[0]["linear loss"]["units"]["1"]
    assert "lm_head.weight" in usual
    assert "lm_head.weight" not in linear
    assert set(linear) == set(usual) - {"lm_head.weight"}


def test_without_a_section_nothing_is_frozen(jobs: list[dict[str, Any]]) -> None:
    assert any('disabled: the config has no "timely_freeze" section' in line for line in jobs[0]["no section"]["lines"])


def test_a_wrong_setting_is_one_line(jobs: list[dict[str, Any]]) -> None:
    lines = [line for line in jobs[0]["wrong setting"]["lines"] if "error:" in line]
    assert len(lines) == 1
    assert "max_freeze_ratio is 6" in lines[0]


def test_deferral_is_refused(jobs: list[dict[str, Any]]) -> None:
    assert any("weight gradients apart from the backward" in line for line in jobs[0]["deferred"]["lines"])
