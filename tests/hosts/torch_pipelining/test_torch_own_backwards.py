"""Stages whose backward is not torch's: their weight gradients stay in it, and training has the host's bits."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from logged import Lines
from torch.distributed.pipelining import PipelineStage
from torch_ranks import Case, Run, batch, build, force_plan, pool, values

pytestmark = pytest.mark.distributed

EXACT = {"max_freeze_ratio": 0.0, "weight_gradients": "deferred"}
CASES = {
    "1f1b": Case(),
    "interleaved": Case(schedule="ScheduleInterleaved1F1B"),
    "zbv": Case(schedule="ScheduleZBVZeroBubble"),
}


class Clipped(PipelineStage):
    """Clips each microbatch's gradient and adds it up, as DP-SGD does in a pipeline (He et al. 2022)."""

    def backward_one_chunk(self, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        super().backward_one_chunk(*args, full_backward=full_backward, **kwargs)
        if full_backward:
            add_clipped(self)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_weight_one_chunk(*args, **kwargs)
        add_clipped(self)


def add_clipped(stage: Any) -> None:
    own = [p for p in stage.submod.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.norm() for p in own]).norm()
    for parameter in own:
        parameter.sum = parameter.sum + parameter.grad * (0.01 / norm).clamp(max=1.0)
        parameter.grad = None


def backward_that_adds(stage: Any, *args: Any, last_backward: bool = False, **kwargs: Any) -> Any:
    """Replaces ``backward_maybe_with_nosync``. In the last backward of a batch it takes the gradients."""
    result = PipelineStage.backward_maybe_with_nosync(stage, *args, last_backward=last_backward, **kwargs)
    if last_backward:
        for parameter in stage.submod.parameters():
            parameter.sum = parameter.sum + parameter.grad
            parameter.grad = None
    return result


def replace_backward(stage: Any, how: str) -> None:
    if how == "a subclass":
        stage.__class__ = Clipped
    else:
        stage.backward_maybe_with_nosync = types.MethodType(backward_that_adds, stage)


@pytest.mark.parametrize("how", ["a subclass", "an attribute"])
@pytest.mark.parametrize("name", CASES)
def test_a_stage_with_its_own_backward_has_the_hosts_bits(name: str, how: str) -> None:
    case = replace(CASES[name], section=EXACT)
    alone, ours = (pool(2).run(train_summed, replace(case, section=s), how) for s in (None, EXACT))
    for (mine, _), (theirs, _) in zip(ours, alone, strict=True):
        for step, expected in zip(mine, theirs, strict=True):
            assert all(torch.equal(step[key], value) for key, value in expected.items())
    method = "Clipped.backward_one_chunk" if how == "a subclass" else "PipelineStage.backward_maybe_with_nosync"
    said = [line for line in ours[0][1] if f"{method} of test_torch_own_backwards is not torch's own" in line]
    assert len(said) == case.stages


def test_only_the_stage_with_its_own_backward_is_left_to_the_host() -> None:
    lines = pool(2).run(train_summed, Case(section=EXACT), "a subclass", 1)[0][1]
    assert [line.split(":")[1].strip() for line in lines if "not torch's own" in line] == ["stage 1"]
    assert any("0% to 9" in line and "can wait" in line for line in lines)


def train_summed(case: Case, how: str, only: int | None = None) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """Train, first without a plan and then in a plan's order; sums and weights after each step."""
    import tf_adapters.torch_pipelining

    run = build(case)
    left = [stage for stage in run.stages if only in (None, stage.stage_index)]
    for stage in left:
        replace_backward(stage, how)
    with Lines() as lines:
        if case.section is not None:
            run.adapter = tf_adapters.torch_pipelining.attach(run.schedule, case.settings(), optimizer=run.optimizers)
        steps = [step_summed(run, left, step) for step in range(2)]
        if run.adapter is not None:
            force_plan(run.adapter.controller, 0.0)
        steps += [step_summed(run, left, step) for step in range(2, 4)]
    return steps, lines.seen


def step_summed(run: Run, left: list[Any], step: int) -> dict[str, torch.Tensor]:
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    summed = [p for stage in left for p in stage.submod.parameters()]
    for parameter in summed:
        parameter.sum = torch.zeros_like(parameter)
    run._run(run.schedule.step, batch(run.case, step, run.replica), [])
    for parameter in summed:
        parameter.grad = parameter.sum
    gradients = {f"gradient of {name}": p.grad.clone() for name, p in run.named.items()}
    for optimizer in run.optimizers:
        optimizer.step()
    return {**gradients, **values(run)}
