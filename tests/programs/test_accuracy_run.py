"""The accuracy study: two real runs on two ranks, its table, and going on where it stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rank_pools import PRELOAD

from tf_adapters.testing import RankPool

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.programs


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Runs the study's quick form on ConvNeXt, on forked ranks, with its results in ``tmp_path``; what it prints."""
    pytest.importorskip("sklearn")
    pytest.importorskip("deepspeed")
    from benchmarks.accuracy import study as accuracy

    command = ["accuracy.py", "--quick", "--tasks", "convnext", "--methods", "none", "timely", "--no-pictures"]
    monkeypatch.setattr(sys, "argv", [*command, "--results", str(tmp_path / "accuracy.jsonl")])
    monkeypatch.setattr(accuracy, "RankPool", partial(RankPool, preload=PRELOAD))
    monkeypatch.chdir(tmp_path)

    def run() -> str:
        accuracy.main()
        return capsys.readouterr().out

    return run


def test_a_study_runs_and_goes_on_where_it_stopped(study: Callable[[], str], tmp_path: Path) -> None:
    printed = study()
    assert "0 of 2 runs are finished" in printed
    records = [json.loads(line) for line in (tmp_path / "accuracy.jsonl").read_text().splitlines()]
    assert [record["cell"]["method"] for record in records] == ["none", "timely"]
    freezing = records[1]
    assert len(freezing["stages"]) == 2
    assert all(len(stage["frozen_share"]) == freezing["steps"] for stage in freezing["stages"])
    assert all(any(stage["frozen_share"]) for stage in freezing["stages"])  # while monitoring at the latest
    assert records[0]["curve"][0] == freezing["curve"][0]  # the same weights and data

    printed = study()
    assert "2 of 2 runs are finished" in printed
    assert len((tmp_path / "accuracy.jsonl").read_text().splitlines()) == 2
