"""Weight gradients are computed apart only where that is for something: monitoring, waiting, sampling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from schedules import gpipe

from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.phase import Phase
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.testing.plans import force_plan, tensor_units
from tf_adapters.training.controller import Controller
from tf_adapters.training.pipeline import HostInfo, HostPipeline
from tf_adapters.weight_gradients.tapped_layer import plain_layer
from tf_adapters.weight_gradients.taps import StageTaps

FUSED = gpipe(1, 2)
SPLIT = PipelineSchedule.from_text([["0F0", "0F1", "0I0", "0B1", "0W0"]])


def steps(
    folder: Path, schedule: PipelineSchedule, plan: Mapping[str, float] | None = None, **settings: str | float
) -> dict[Phase, set[tuple[int, bool]]]:
    """By phase: microbatches of a linear layer on one rank, and whether their outputs were tapped.

    ``plan`` are freeze ratios, in place of those that would be planned.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    parameters = {0: dict(model.named_parameters())}
    config = TimelyFreezeConfig(
        warmup_steps=1, monitoring_steps=2, progressive_steps=1, output_dir=str(folder), **settings
    )
    taps = {0: StageTaps(model, plain_layer)}
    taps[0].install()
    pipeline = HostPipeline(HostInfo("test", "0"), schedule, {0: tensor_units(parameters[0])}, parameters, taps=taps)
    controller = Controller(config, pipeline, Collectives())
    inputs = torch.randn(2, 3, 4)
    seen: dict[Phase, set[tuple[int, bool]]] = {}
    for number in range(6):
        model.zero_grad()
        if number == 4 and plan:
            force_plan(controller, plan)
        controller.begin_step()
        outputs = {}
        for action in controller.execution.ranks[0]:
            if action.kind is Kind.WEIGHT_GRAD:
                controller.compute_weight_gradients(0, action.microbatch)
                continue
            with controller.running(action):
                if action.kind is Kind.FORWARD:
                    output = outputs[action.microbatch] = model(inputs[action.microbatch].requires_grad_())
                    tapped = "Tap" in output.grad_fn.name()
                    seen.setdefault(controller.phase, set()).add((action.microbatch, tapped))
                else:
                    outputs.pop(action.microbatch).sum().backward()
        expected = inputs.detach().sum((0, 1)).expand(4, 4)
        if not config.samples_tokens:
            torch.testing.assert_close(model[0].weight.grad, expected)
        controller.end_step()
    taps[0].remove()
    return seen


@pytest.mark.parametrize("schedule", [FUSED, SPLIT], ids=["fused", "split"])
def test_a_backward_that_is_not_split_is_the_hosts_own_once_there_is_a_plan(tmp_path, schedule):
    seen = steps(tmp_path, schedule, weight_gradients="deferred", max_freeze_ratio=0.0)
    apart = {0: schedule is SPLIT, 1: False}
    assert seen[Phase.WARMUP] == {(0, True), (1, True)}  # the first step, in which taps only compare
    assert seen[Phase.MONITORING_UPPER] == {(0, True), (1, True)}
    assert seen[Phase.STABLE] == set(apart.items())


def test_a_microbatch_whose_tokens_are_all_kept_has_the_hosts_own_backward(tmp_path):
    seen = steps(tmp_path, FUSED, {"0B0": 0.5}, granularity="token")
    assert seen[Phase.MONITORING_UPPER] == {(0, True), (1, True)}
    assert seen[Phase.STABLE] == {(0, True), (1, False)}
