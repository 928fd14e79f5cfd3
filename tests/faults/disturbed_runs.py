"""Runs that faults are made in, on every host."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import hosts
import pytest
from jobs import Tell

from tf_adapters.report import Report
from tf_adapters.training import plan_maker

LIFE = {
    "warmup_steps": 30,
    "monitoring_steps": 60,
    "progressive_steps": 60,
    "replan_interval": 5,
    "replan_threshold": 0.0,
    "on_error": "warn",
}
HOSTS = [name for name in hosts.HOSTS if name != "deepspeed gpipe"]
each_host = pytest.mark.parametrize("host", HOSTS)
SHORT_LIFE = {
    **{"warmup_steps": 4, "monitoring_steps": 10, "progressive_steps": 4, "monitoring_precision": 1e-6},
    **{"replan_interval": 2, "replan_threshold": 0.0, "on_error": "warn"},
}
AT = {"warmup": 2, "monitoring": 8, "progressive": 16, "stable": 22}
"""The step of a run of ``SHORT_LIFE`` at which a fault comes, by phase."""


def train(tell: Tell, host: str, section: dict[str, Any], steps: int) -> None:
    """Train, and tell of every step."""
    training = hosts.start(host, section, output_dir="out")
    for number in range(steps):
        tell(step=number, phase=training.controller.phase.value)
        training.step(number)
    state = training.controller.state
    made = state.plan.makespan_ms.unfrozen if state.plan else None
    tell(failure=state.failure, unfrozen_ms=made, phase=training.controller.phase.value)
    training.detach()


@mock.patch.object(plan_maker, "_SOLVED_AT_ONCE", 0)
def train_beside(tell: Tell, host: str, section: dict[str, Any], steps: int) -> None:
    """The same, with every plan made by another process, as those of many actions are."""
    train(tell, host, section, steps)


def report_of(folder: Path) -> dict[str, Any] | None:
    """The report of a run, read as a user would; None where it has left none. No half-written file is beside it."""
    assert not list(folder.rglob("*.tmp"))
    paths = list(folder.rglob("report.json"))
    return Report.read(paths[0]).to_json() if paths else None
