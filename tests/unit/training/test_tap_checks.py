"""Taps are checked in the first step of a process, again while a gradient proves nothing, and in audits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from logged import Lines
from schedules import gpipe

from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.testing.plans import tensor_units
from tf_adapters.training import tap_checks
from tf_adapters.training.controller import Controller
from tf_adapters.training.pipeline import HostInfo, HostPipeline
from tf_adapters.weight_gradients.reasons import OTHER_USES, SECOND_DERIVATIVE, UNPROVEN
from tf_adapters.weight_gradients.tapped_layer import plain_layer
from tf_adapters.weight_gradients.taps import StageTaps

MICROBATCHES = 2


class Net(torch.nn.Module):
    """Two linear layers. ``scale`` hides the second one while it is 0; ``shared`` uses its weight a second time.

    With ``accumulates`` a forward runs a backward of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
        self.scale, self.shared, self.penalty, self.accumulates = 1.0, False, False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        out = x + self.scale * self.down(hidden)
        if self.shared:
            out = out + torch.nn.functional.linear(hidden, self.down.weight)
        if self.penalty:
            (slope,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
            out = out + slope.square().mean()
        if self.accumulates:
            out.mean().backward(retain_graph=True)
        return out


class Run:
    """One rank that trains without a host, next to a copy of its model that has no taps."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, monitoring: int = 2, sole: bool = False) -> None:
        torch.manual_seed(0)
        monkeypatch.setattr(tap_checks, "AUDIT_INTERVAL", 8)
        self.model, self.alone = Net(), Net()
        self.alone.load_state_dict(self.model.state_dict())
        parameters = {0: dict(self.model.named_parameters())}
        config = TimelyFreezeConfig(
            weight_gradients="deferred",
            goal="exact",
            warmup_steps=1,
            monitoring_steps=monitoring,
            progressive_steps=0,
            output_dir=str(folder),
        )
        self.taps = StageTaps(self.model, plain_layer, sole=sole)
        self.taps.install()
        pipeline = HostPipeline(
            HostInfo("test", "0"),
            gpipe(1, MICROBATCHES),
            {0: tensor_units(parameters[0])},
            parameters,
            taps={0: self.taps},
        )
        self.controller = Controller(config, pipeline, Collectives())

    def step(self, **flags: Any) -> dict[str, bool]:
        """Run one step in the order of the controller. Return whether each gradient has the copy's bits."""
        for model in (self.model, self.alone):
            model.zero_grad()
            for name, value in flags.items():
                setattr(model, name, value)
        batch = torch.randn(MICROBATCHES, 3, 4)
        losses = {}
        self.controller.begin_step()
        for action in self.controller.execution.ranks[0]:
            with self.controller.running(action):
                if action.kind.value == "F":
                    x = batch[action.microbatch].clone().requires_grad_()
                    losses[action.microbatch] = self.model(x).square().sum()
                elif action.kind.value != "W":
                    losses.pop(action.microbatch).backward()
        self.controller.end_step()
        for x in batch:
            self.alone(x.clone().requires_grad_()).square().sum().backward()
        named = dict(self.alone.named_parameters())
        return {n: torch.equal(p.grad, named[n].grad) for n, p in self.model.named_parameters()}

    @property
    def left(self) -> dict[str, str]:
        assert self.controller.state.taps is not None
        return dict(self.controller.state.taps.left.get(0, {}))


Make = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Run] = []

    def make(**settings: Any) -> Run:
        made.append(Run(tmp_path, monkeypatch, **settings))
        return made[-1]

    yield make
    for run in made:
        run.taps.remove()


def test_a_gradient_of_zero_proves_nothing_until_a_later_step_shows_another(make_run: Make) -> None:
    run = make_run()
    both = {"up.weight": UNPROVEN, "down.weight": UNPROVEN}
    run.step(scale=0.0)
    assert run.left == both
    for _ in range(2):  # of these, step 2 looks again
        assert all(run.step(scale=1.0).values())
    assert run.left == {}
    assert run.taps.names == {"up.weight", "down.weight"}


def test_an_audit_finds_a_use_that_no_tap_sees(make_run: Make) -> None:
    run = make_run()
    for _ in range(5):
        assert all(run.step().values())
    with Lines() as lines:
        while run.controller.step <= 8:
            run.step(shared=True)
    assert run.left == {"down.weight": OTHER_USES}
    (line,) = [line for line in lines.seen if "no longer what a tap computes" in line]
    assert "step 8: stage 0: the weight gradient of down.weight" in line
    assert "in step 1" in line
    assert line.removeprefix("timely_freeze: ") in run.controller.state.notes
    assert all(run.step().values())  # the host computes it


def test_a_use_that_a_tap_sees_is_right_at_once_and_left_from_the_next_step_on(make_run: Make) -> None:
    run = make_run(monitoring=20)
    for _ in range(4):
        run.step()
    with Lines() as lines:
        assert all(run.step(penalty=True).values())
    (line,) = [line for line in lines.seen if SECOND_DERIVATIVE in line]
    assert "step 5, stage 0" in line
    assert all(run.step().values())
    assert any(SECOND_DERIVATIVE in note for note in run.controller.view().local_measurements().notes)
    assert "down.weight" not in run.taps.names


def test_gradients_that_are_added_beside_a_tap_are_seen_in_that_step(make_run: Make) -> None:
    run = make_run(monitoring=20, sole=True)
    for _ in range(4):
        run.step()
    with Lines() as lines:
        run.step(shared=True)
    assert any("step 5, stage 0" in line and OTHER_USES in line for line in lines.seen)
    assert all(run.step().values())


def test_a_state_brings_no_findings_into_another_process(make_run: Make) -> None:
    run = make_run()
    run.step()
    saved = run.controller.state_dict()
    run.controller.load_state_dict(saved)
    assert run.controller.state.taps is None
    run.step(shared=True)  # the first step after the resume checks
    assert run.left == {"down.weight": OTHER_USES}


def test_where_a_forward_accumulates_gradients_forwards_keep_their_order(make_run: Make) -> None:
    run = make_run()
    run.step(accumulates=True)
    assert run.controller._decisions.plan_maker.keeps_forwards
    assert run.controller.state.taps is not None
    assert run.controller.state.taps.keeps_forwards
    usual = make_run()
    usual.step()
    assert usual.controller.state.taps is not None
    assert not usual.controller.state.taps.keeps_forwards
