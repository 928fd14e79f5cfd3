"""What the language model study trains with: gradients of masked microbatches, and tables without noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.language_model.network import Shape
from benchmarks.language_model.table import STEPS, WALL_CLOCK, by_task, contrasts, gains
from benchmarks.language_model.tasks import TASKS, rows_of
from benchmarks.language_model.training import Training
from benchmarks.language_model.ways import BASE, EXACT, MICROBATCHES, WAYS

TASK = replace(TASKS["from scratch"], shape=Shape(layers=4, width=16, heads=2, context=8))


@pytest.mark.parametrize("way", ["tensors", "tensors, independent masks", "deferred, tensors"])
def test_all_microbatches_at_once_have_the_gradients_of_each_with_its_frozen_weights(way: str) -> None:
    training = Training(TASK, WAYS[way], seed=0)
    rows = rows_of(TASK.data(MICROBATCHES * TASK.rows, seed=0), range(MICROBATCHES * TASK.rows))
    training._backward(rows)
    parameters = [dict(stage.named_parameters()) for stage in training.stages]
    seen = [{name: _taken(parameter) for name, parameter in named.items()} for named in parameters]

    for taps in training.taps.values():
        taps.remove()
    some_frozen = False
    for microbatch, (inputs, labels) in enumerate(zip(*(t.split(TASK.rows) for t in rows), strict=True)):
        x = inputs
        for index, stage in enumerate(training.stages):
            frozen = training.step_masks.of(index, microbatch).names
            some_frozen |= bool(frozen)
            for name, parameter in parameters[index].items():
                parameter.requires_grad_(name not in frozen)
            x = stage(x)
        loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten()) / MICROBATCHES
        loss.backward()  # type: ignore[no-untyped-call]
    assert some_frozen
    for ours, named in zip(seen, parameters, strict=True):
        for name, parameter in named.items():
            torch.testing.assert_close(ours[name], _taken(parameter), rtol=1e-4, atol=1e-6, msg=name)


def _taken(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient, which is forgotten; zero where there is none."""
    gradient, parameter.grad = parameter.grad, None
    return torch.zeros_like(parameter) if gradient is None else gradient.clone()


def test_a_weight_that_no_microbatch_trains_stays() -> None:
    way = replace(WAYS["tensors, independent masks"], target=None)
    training = Training(TASK, way, seed=0)
    data = TASK.data(16 * MICROBATCHES * TASK.rows, seed=0)
    held = 0
    for step in range(16):
        before = [{name: p.detach().clone() for name, p in stage.named_parameters()} for stage in training.stages]
        training.train_step(
            rows_of(data, range(step * MICROBATCHES * TASK.rows, (step + 1) * MICROBATCHES * TASK.rows))
        )
        for parameter in training.step_masks.held_parameters():
            index, name = next(
                (i, n) for i, stage in enumerate(training.stages) for n, p in stage.named_parameters() if p is parameter
            )
            assert torch.equal(before[index][name], parameter)
            held += 1
    assert held


def run(way: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    same = {"speedup": 1.0, "mean_freeze_ratio": 0.0, STEPS: loss + 0.1}
    return {"task": "from scratch", "way": way, "seed": seed, WALL_CLOCK: loss, **same, **more}


def test_differences_are_paired_by_seed_and_one_seed_has_no_error() -> None:
    rows = [run(BASE, 0, 2.0), run(BASE, 1, 3.0), run(EXACT, 0, 1.9), run(EXACT, 1, 2.88), run("tokens", 1, 2.5)]
    table = gains(by_task(rows), WALL_CLOCK)
    assert "loss 2.500" in table
    assert "+0.110 ± 0.010 (2)" in table
    assert "+0.500, one seed" in table
    assert "nan" not in table + contrasts(by_task(rows))
