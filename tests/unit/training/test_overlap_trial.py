"""Where it is not clear whether ranks meet, a trial of a few steps decides if steps that overlap pay."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from clocks import FakeClock
from schedules import gpipe

from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.testing.plans import tensor_units
from tf_adapters.training import overlap_trial
from tf_adapters.training.controller import Controller
from tf_adapters.training.pipeline import HostInfo, HostPipeline
from tf_adapters.training.plan_maker import MonitoredSteps, PlanMaker

MEETING_MS = 10.0
FIRST_STABLE = 4


class Run:
    """A run on one rank. An action takes ``overlapping_ms`` under the plan for steps that overlap."""

    def __init__(self, folder: Path, overlapping_ms: float, meetings: tuple[str, ...] = ()) -> None:
        model = torch.nn.Linear(4, 4)
        parameters = {0: dict(model.named_parameters())}
        self.clock, self.overlapping_ms = FakeClock(), overlapping_ms
        config = TimelyFreezeConfig(
            warmup_steps=1, monitoring_steps=2, progressive_steps=0, monitoring="halves", output_dir=str(folder)
        )
        host, units = HostInfo("test", "0"), {0: tensor_units(parameters[0])}
        pipeline = HostPipeline(host, gpipe(1, 2), units, parameters, clock=self.clock, meetings=meetings)
        self.controller = Controller(config, pipeline, Collectives())
        self.overlapped: list[bool] = []
        """Of each step, whether its plan was the one for steps that overlap."""

    def train(self, steps: int) -> None:
        for _ in range(steps):
            overlap = self.controller.state.measurement.overlap
            self.overlapped.append(overlap)
            self.controller.begin_step()
            for action in self.controller.execution.ranks[0]:
                with self.controller.running(action):
                    self.clock.now += self.overlapping_ms if overlap else MEETING_MS
            self.controller.end_step()


@pytest.fixture(autouse=True)
def unclear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the monitored steps say nothing. On one rank no plan promises a gain: let the trial's plan do so."""
    measure = PlanMaker.measure
    monkeypatch.setattr(PlanMaker, "measure", lambda *args: MonitoredSteps(*measure(*args)[:2], own_times={0: 1.0}))
    monkeypatch.setattr(overlap_trial, "_PAYS", 1.0)


@pytest.mark.parametrize("overlapping_ms", [9.0, 11.0])
def test_the_faster_plan_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture, overlapping_ms: float) -> None:
    caplog.set_level(logging.INFO)
    run = Run(tmp_path, overlapping_ms)
    run.train(40)
    counted = overlap_trial.STEPS + 1
    tried = run.overlapped[FIRST_STABLE - 1 + counted :][:counted]
    assert not any(run.overlapped[: FIRST_STABLE - 1 + counted])
    assert all(tried)
    assert set(run.overlapped[FIRST_STABLE - 1 + 2 * counted :]) == {overlapping_ms < MEETING_MS}
    said = f"a step takes {4 * overlapping_ms:.1f} ms with the plan for steps that overlap and 40.0 ms with"
    assert sum(said in message for message in caplog.messages) == 1
    assert not any("all ranks meet" in m and "not clear" not in m for m in caplog.messages)


def test_a_plan_that_promises_nothing_more_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_trial, "_PAYS", 0.99)
    run = Run(tmp_path, 5.0)
    run.train(40)
    assert not any(run.overlapped)


def test_what_the_hosts_settings_say_needs_no_trial(tmp_path: Path) -> None:
    run = Run(tmp_path, 5.0, meetings=("clip_grad 1",))
    run.train(40)
    assert not any(run.overlapped)
