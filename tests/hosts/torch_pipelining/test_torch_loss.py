"""A loss that trains a layer itself, as TorchTitan's ChunkedLossWrapper: that layer is never planned as frozen."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch_ranks import Case, Layers, batch, build, force_plan, loss_fn, pool, values

from tf_adapters.testing import relative_error
from tf_adapters.torch_pipelining.units import TRAINED_BY_LOSS, trained_by_loss


class Inside:
    """Runs the output layer forward and backward by itself, in two halves, and hands the rest to the pipeline."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head

    def __call__(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        cut = hidden.detach().requires_grad_()
        loss = sum(loss_fn(self.head(h), y) / 2 for h, y in zip(cut.chunk(2), labels.chunk(2), strict=True))
        loss.backward()
        return _Given.apply(hidden, cut.grad, loss.detach())


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gradient: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient, None, None


MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (loss_fn, set()),
        (Inside(MODEL[1]), {"1.weight", "1.bias"}),
        (Inside(MODEL[1]).__call__, {"1.weight", "1.bias"}),
        (functools.partial(lambda head, x, y: head(x), MODEL[1]), {"1.weight", "1.bias"}),
        ((lambda head: lambda x, y: head(x))(MODEL[1]), {"1.weight", "1.bias"}),
        (Inside(MODEL), set()),
        (Inside(nn.Linear(2, 2)), set()),
    ],
)
def test_what_a_loss_trains_is_told_from_what_it_holds(loss: Any, expected: set[str]) -> None:
    assert trained_by_loss(loss, MODEL) == expected


def test_of_a_loss_that_holds_the_whole_model_a_mark_tells() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    vars(model)[TRAINED_BY_LOSS] = ("1",)
    assert trained_by_loss(Inside(model), model) == {"1.weight", "1.bias"}


@pytest.mark.distributed
@pytest.mark.parametrize("weight_gradients", ["in_place", "deferred"])
def test_a_layer_that_the_loss_trains_keeps_its_whole_gradient(weight_gradients: str) -> None:
    for error, frozen in pool(2).run(trained_inside, weight_gradients):
        assert error < 1e-5
        assert frozen > 0


def trained_inside(weight_gradients: str) -> tuple[float, int]:
    import tf_adapters.torch_pipelining

    case = Case(microbatches=4)
    run = build(case)
    last = next((stage for stage in run.stages if stage.is_last), None)
    head = last.submod.layers["9"] if last else None
    if last:
        hidden = [layer for name, layer in last.submod.layers.items() if name != "9"]
        last.submod.forward = lambda x: functools.reduce(lambda value, layer: layer(value), hidden, x)
        run.schedule._loss_fn = Inside(head)
    run._run(run.schedule.step, batch(case, 0, 0), [])  # torch tries the loss out on memory as it finds it
    settings = {**case.settings(), "max_freeze_ratio": 1.0, "weight_gradients": weight_gradients}
    run.adapter = tf_adapters.torch_pipelining.attach(run.schedule, settings, optimizer=run.optimizers)
    force_plan(run.adapter.controller, 0.8)
    before = values(run)
    controller = run.adapter.controller
    frozen = {n for s in range(2) for m in range(4) for n in controller.frozen_parameters(controller.step, s, m)}
    assert not any(name.startswith("layers.9.") for name in frozen)
    gradients: dict[str, torch.Tensor] = {}
    kept = {name: p for name, p in run.named.items() if name.startswith("layers.9.")}
    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(lambda *_: gradients.update({n: p.grad.clone() for n, p in kept.items()}))
    run.train_step(3)
    run.adapter.detach()
    assert len(gradients) == (2 if last else 0)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, before)
    whole = {name: value for state in states for name, value in state.items()}
    return head_error(case, whole, gradients), len(frozen)


def head_error(case: Case, state: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> float:
    """How far the output layer's gradients are from those of an ordinary copy of the model."""
    model = Layers()
    model.load_state_dict(state)
    tokens, labels = batch(case, 3, 0)
    loss = sum(
        loss_fn(model(x), y) / case.microbatches
        for x, y in zip(tokens.chunk(case.microbatches), labels.chunk(case.microbatches), strict=True)
    )
    loss.backward()
    expected = dict(model.named_parameters())
    return max((relative_error(gradient, expected[name].grad) for name, gradient in gradients.items()), default=0.0)
