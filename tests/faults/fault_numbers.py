"""Losses that are no numbers, clocks that jump, models that raise in the midst of a step, on every host."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import hosts
import pytest
import torch
from disturbed_runs import AT, SHORT_LIFE, each_host, report_of
from jobs import Tell, start

LEVERS: dict[str, dict[str, Any]] = {
    "tensors": {},
    "deferred tokens": {"weight_gradients": "deferred", "granularity": "token"},
}


def parameters_of(training: Any) -> list[torch.nn.Parameter]:
    return [p for of_stage in training.controller.pipeline.parameters.values() for p in of_stage.values()]


def poisoned(tell: Tell, host: str, value: float, at: int, lever: str) -> None:
    """Train; from a step on the weights of rank 1 hold a value that is no number, as after a loss that was none."""
    training = hosts.start(host, {**SHORT_LIFE, **LEVERS[lever]}, output_dir="out")
    losses: list[float] = []
    for number in range(30):
        if number == at and int(os.environ["RANK"]) == 1:
            with torch.no_grad():
                for parameter in parameters_of(training):
                    parameter.fill_(value)
        losses = training.step(number)
    state = training.controller.state
    flags = all(parameter.requires_grad for parameter in parameters_of(training))
    finite = all(math.isfinite(loss) for loss in losses)
    tell(failure=state.failure, phase=training.controller.phase.value, flags=flags, finite=finite)
    training.detach()


@each_host
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("phase", AT)
@pytest.mark.parametrize("lever", LEVERS)
def fault_losses_are_no_numbers(host: str, value: float, phase: str, lever: str, tmp_path: Path) -> None:
    """Training goes on as it would without us, and the report holds numbers."""
    with start(poisoned, host, tmp_path, value, AT[phase], lever) as job:
        assert job.ended() == [0, 0], job.output(0) + job.output(1)
        for rank in range(2):
            last = job.events(rank)[-1]
            assert last["failure"] is None
            assert last["phase"] == "stable"
            assert last["flags"]
        assert not all(job.events(rank)[-1]["finite"] for rank in range(2))
        assert report_of(tmp_path)
        for path in tmp_path.rglob("report.json"):
            assert not {"NaN", "Infinity"} & set(path.read_text().replace(",", " ").split())


def jumped(tell: Tell, host: str, seconds: float, at: int) -> None:
    """Train; in the midst of a step, and from there on, the clocks of rank 1 are another time."""
    training = hosts.start(host, SHORT_LIFE, output_dir="out")
    for number in range(30):
        if number == at and int(os.environ["RANK"]) == 1:
            module = modules_holding(training, parameters_of(training)[0])[0]
            handle = module.register_forward_hook(lambda *_: jump(seconds))
        training.step(number)
        if number == at and int(os.environ["RANK"]) == 1:
            handle.remove()
    state = training.controller.state
    made = state.plan.makespan_ms.unfrozen if state.plan else None
    tell(failure=state.failure, phase=training.controller.phase.value, unfrozen_ms=made)
    training.detach()


def jump(seconds: float) -> None:
    """Put all of Python's clocks forward, or back."""
    for name, of_a_second in {"perf_counter_ns": 10**9, "perf_counter": 1, "time": 1, "monotonic": 1}.items():
        clock, offset = getattr(time, name), int(seconds * of_a_second)
        setattr(time, name, lambda clock=clock, offset=offset: clock() + offset)


@each_host
@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
@pytest.mark.parametrize("phase", ["monitoring", "stable"])
def fault_a_clock_jumps(host: str, seconds: float, phase: str, tmp_path: Path) -> None:
    """By an hour in the midst of a step: the plan is not that of a pipeline whose stage takes an hour."""
    with start(jumped, host, tmp_path, seconds, AT[phase]) as job:
        assert job.ended() == [0, 0], job.output(0) + job.output(1)
        for rank in range(2):
            last = job.events(rank)[-1]
            assert (last["failure"], last["phase"]) == (None, "stable")
            assert 0.0 < last["unfrozen_ms"] < 1000.0
        assert report_of(tmp_path)


class ErrorOfTheUser(Exception):
    pass


def interrupted(tell: Tell, host: str, at: int, lever: str) -> None:
    """Train; in the midst of a step both ranks' models raise; then the run ends, as after a user's error."""
    training = hosts.start(host, {**SHORT_LIFE, **LEVERS[lever]}, output_dir="out")
    modules = {m for p in parameters_of(training)[:1] for m in modules_holding(training, p)}
    assert modules
    raised = False
    for number in range(at + 1):
        handles = []
        if number == at:
            handles = [module.register_forward_hook(raise_on_the_second()) for module in modules]
        try:
            training.step(number)
        except Exception:  # the host's own on a rank that waits for one that has raised and gone
            raised = True
        finally:
            for handle in handles:
                handle.remove()
    tell(raised=raised, flags=all(p.requires_grad for p in parameters_of(training)))


def modules_holding(training: Any, parameter: torch.nn.Parameter) -> list[torch.nn.Module]:
    import gc

    return [
        module
        for module in gc.get_objects()
        if isinstance(module, torch.nn.Module) and any(p is parameter for p in module._parameters.values())
    ]


def raise_on_the_second() -> Any:
    calls = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ErrorOfTheUser("in the midst of a step")

    return hook


@each_host
@pytest.mark.parametrize("phase", AT)
@pytest.mark.parametrize("lever", LEVERS)
def fault_the_model_raises_in_the_midst_of_a_step(host: str, phase: str, lever: str, tmp_path: Path) -> None:
    """No parameter is left frozen; nothing hangs."""
    with start(interrupted, host, tmp_path, AT[phase], lever) as job:
        assert job.ended() == [0, 0], job.output(0) + job.output(1)
        for rank in range(2):
            assert job.events(rank)[-1] == {"raised": True, "flags": True}
