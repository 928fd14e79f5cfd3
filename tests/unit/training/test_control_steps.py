"""The gain is measured against steps that run as the host alone, and a run that gains nothing goes back to the host."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import one_rank
import pytest
import torch
from clocks import FakeClock
from schedules import gpipe

from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.control_steps import EARLY_KNOWN, ControlPairs, Pair, is_control, speedup
from tf_adapters.measuring.phase import Phase
from tf_adapters.report import Report
from tf_adapters.report.observer import RunReporter
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.testing.plans import tensor_units
from tf_adapters.training.controller import Controller
from tf_adapters.training.pipeline import HostInfo, HostPipeline
from tf_adapters.weight_gradients.tapped_layer import plain_layer
from tf_adapters.weight_gradients.taps import StageTaps

DEFERRED = PipelineSchedule.from_text([["0F0", "0F1", "0I0", "0B1", "0W0"]])
"""The order of the plan: one weight gradient waits."""

GAIN = 1.15
"""Of the plan's order, without the cost of taps."""

STEADY = 4
"""Steps until the plan is fully in force."""


class Run:
    """A run on one rank whose actions take as long as the test says; ``tap_cost`` is a share of a step."""

    def __init__(self, folder: Path, tap_cost: float) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
        parameters = {0: dict(self.model.named_parameters())}
        self.clock, self.tap_cost = FakeClock(), tap_cost
        config = TimelyFreezeConfig(
            warmup_steps=1, monitoring_steps=2, progressive_steps=0, monitoring="halves", output_dir=str(folder)
        )
        self.taps = StageTaps(self.model, plain_layer)
        self.taps.install()
        pipeline = HostPipeline(
            HostInfo("test", "0"),
            gpipe(1, 2),
            {0: tensor_units(parameters[0])},
            parameters,
            taps={0: self.taps},
            clock=self.clock,
        )
        self.controller = Controller(config, pipeline, Collectives(), RunReporter(Collectives()))
        self.tapped: list[bool] = []
        """Of each step, whether its layers were tapped."""

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model.zero_grad()
            self._defer()
            self.controller.begin_step()
            outputs: dict[int, torch.Tensor] = {}
            for action in self.controller.execution.ranks[0]:
                if action.kind is Kind.WEIGHT_GRAD:
                    self.controller.compute_weight_gradients(0, action.microbatch)
                    continue
                with self.controller.running(action):
                    self._compute(action.kind, action.microbatch, outputs)
            self.controller.end_step()

    def _defer(self) -> None:
        """On one rank a plan defers nothing: put one into force that does."""
        plans = self.controller.state.plans.of
        for number, batch in plans.items():
            ratios = {action: 0.0 for action in DEFERRED.actions if action.freezable}
            plan = dataclasses.replace(batch.plan, schedule=DEFERRED, freeze_ratio=ratios)
            plans[number] = dataclasses.replace(batch, plan=plan)

    def _compute(self, kind: Kind, microbatch: int, outputs: dict[int, torch.Tensor]) -> None:
        state = self.controller.state
        alone = state.runs_as_host(self.controller.step)
        self.clock.now += 10.0 if alone or state.plan is None else 10.0 * (1 + self.tap_cost) / GAIN
        if kind is Kind.FORWARD:
            outputs[microbatch] = self.model(torch.ones(2, 4, requires_grad=True))
        else:
            outputs.pop(microbatch).sum().backward()

    @property
    def report(self) -> Report:
        return Report.read(self.controller.report_path)


@pytest.mark.parametrize("tap_cost", [0.0, 0.1, 0.3])
def test_the_logs_speedup_is_that_over_control_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tap_cost: float
) -> None:
    caplog.set_level(logging.INFO)
    run = Run(tmp_path, tap_cost)
    run.train(STEADY + EARLY_KNOWN + 10)
    run.controller.close()
    measured, truth = run.report.measured, GAIN / (1 + tap_cost)
    assert measured.speedup == pytest.approx(truth, rel=0.02)
    assert measured.speedup_interval is not None
    assert measured.control_steps == 8
    lost = truth < 1.0
    assert run.controller.state.left_to_host == lost
    assert ("the host alone is faster" in caplog.text) == lost
    if not lost:
        assert f"{truth:.2f}x as fast as the host alone" in caplog.text


def test_a_run_that_was_left_to_the_host_stays_so_after_a_resume(tmp_path: Path) -> None:
    run = Run(tmp_path, tap_cost=0.3)
    run.train(STEADY + EARLY_KNOWN + 1)
    assert run.controller.state.left_to_host
    again = Run(tmp_path, tap_cost=0.3)
    again.controller.load_state_dict(run.controller.state_dict())
    again.train(2)
    assert again.controller.state.left_to_host
    assert again.controller.execution == again.controller.schedule
    assert again.controller.timer.step_ms(Phase.STABLE) is None


def test_control_steps_are_few() -> None:
    steps = [step for step in range(1, 10_001) if is_control(step)]
    assert steps[:9] == [12, 16, 20, 24, 28, 32, 36, 40, 112]
    assert len(steps) / 10_000 < 0.012


def test_a_control_step_counts_among_planned_ones_of_its_size() -> None:
    pairs = ControlPairs()
    for number, microbatches, ms, is_host in [
        (1, 4, 10.0, False),
        (2, 4, 15.0, True),
        (3, 4, 12.0, False),
        (4, 4, 14.0, False),  # counts
        (5, 4, 12.0, True),
        (6, 2, 7.0, False),  # other batches
        (7, 2, 7.0, False),
        (8, 2, 9.0, True),
        (10, 2, 7.0, False),  # a step between them was none of both
        (11, 2, 7.0, False),
    ]:
        pairs.add(number, microbatches, ms, is_control=is_host)
    assert pairs.of(None) == pairs.of(4) == (Pair(4, 15.0, 12.0),)
    assert pairs.of(2) == ()


def test_ranks_whose_steps_overlap_find_the_same_speedup() -> None:
    """Two ranks, in units of a forward: the host's step takes 15, the planned one 12. Rank 1 is behind."""
    early, late = [12.0, 15.0, 12.0, 12.0], [12.0, 12.0, 15.0, 12.0]
    for durations in (early, late):
        pairs = ControlPairs()
        for number, ms in enumerate(durations):
            pairs.add(number, 4, ms, is_control=number == 1)
        assert [pair.ratio for pair in pairs.of(4)] == [15.0 / 12.0]


def test_a_control_step_beside_a_slow_one_takes_no_less_than_nothing() -> None:
    pairs = ControlPairs()
    for number, ms in enumerate((40.0, 10.0, 10.0, 40.0)):
        pairs.add(number, 4, ms, is_control=number == 1)
    assert [pair.host_ms for pair in pairs.of(4)] == [0.0]


def test_a_speedup_needs_six_control_steps_and_holds_out_against_outliers() -> None:
    ratios = [1.1, 1.2, 1.1, 1.2, 1.15, 9.0, 0.1, 1.1, 1.2]
    pairs = [Pair(4, 10.0 * ratio, 10.0) for ratio in ratios]
    assert speedup(pairs[:5]) is None
    found = speedup(pairs)
    assert found is not None
    assert (found.value, found.low, found.high, found.steps) == (pytest.approx(1.15), 1.1, pytest.approx(1.2), 9)
    wider = speedup(pairs, confidence=0.99)
    assert wider is not None
    assert (wider.low, wider.high) == (pytest.approx(0.1), 9.0)


def test_a_plan_of_the_hosts_own_order_has_no_control_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_defer", lambda run: None)
    run = Run(tmp_path, tap_cost=0.3)
    run.train(STEADY + EARLY_KNOWN + 1)
    assert run.controller.timer.controls.of(None) == ()
    assert not run.controller.state.left_to_host


def test_a_freezing_run_has_control_steps_that_train_everything_also_after_a_resume(tmp_path: Path) -> None:
    run = one_rank.controller_of(gpipe(1, 4), tmp_path, monitoring="halves")
    before = 7  # steps until the plan is fully in force
    shares = one_rank.train(run, before + EARLY_KNOWN + 10)
    controls = [step - before for step in range(before + 1, len(shares) + 1) if not shares[step - 1]]
    assert controls == [12, 16, 20, 24, 28, 32, 36, 40]
    run.close()
    share = shares[-1]
    assert Report.read(run.report_path).measured.speedup == pytest.approx(2.0 / (2.0 - 0.5 * share), rel=0.02)
    again = one_rank.controller_of(gpipe(1, 4), tmp_path, monitoring="halves")
    again.load_state_dict(run.state_dict())
    for step in (before + 11, before + 12, before + 13):
        assert again.frozen_parameters(step, 0, 0) == run.frozen_parameters(step, 0, 0)


def test_a_new_plan_drops_the_comparison_with_the_one_before() -> None:
    pairs = ControlPairs()
    for number in range(1, 9):
        pairs.add(number, 4 if number < 5 else 2, 10.0, is_control=number % 4 == 2)
    assert [len(pairs.of(microbatches)) for microbatches in (4, 2)] == [1, 1]
    pairs.forget(2)
    assert [len(pairs.of(microbatches)) for microbatches in (4, 2)] == [1, 0]
