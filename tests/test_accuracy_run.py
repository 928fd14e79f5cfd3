"""The accuracy study as it is started: two real runs on two ranks, its table, and going on where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.distributed


def study(folder: Path, *arguments: str) -> str:
    """Run the study's quick form on ConvNeXt with its results in ``folder``; what it prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / "accuracy.py"), "--quick", "--tasks", "convnext", "--methods"]
    done = subprocess.run(
        [*command, "none", "timely", "--results", str(folder / "accuracy.jsonl"), *arguments],
        cwd=folder,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_study_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("deepspeed")
    printed = study(tmp_path, "--no-pictures")
    assert "0 of 2 runs are finished" in printed
    records = [json.loads(line) for line in (tmp_path / "accuracy.jsonl").read_text().splitlines()]
    assert [record["cell"]["method"] for record in records] == ["none", "timely"]
    freezing = records[1]
    assert len(freezing["stages"]) == 2
    assert all(len(stage["frozen_share"]) == freezing["steps"] for stage in freezing["stages"])
    assert freezing["stages"][1]["frozen_share"][-1] > 0
    assert records[0]["curve"][0] == freezing["curve"][0]  # the same weights and data

    printed = study(tmp_path, "--no-pictures")
    assert "2 of 2 runs are finished" in printed
    assert len((tmp_path / "accuracy.jsonl").read_text().splitlines()) == 2
