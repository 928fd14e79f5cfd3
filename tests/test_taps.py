"""Weight gradients that are computed apart reach their parameters as a backward's own would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tf_adapters.masking.taps import StageTaps, plain_layer


class Copies(TorchDispatchMode):
    """Counts the copies that are made of tensors while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func._overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_)
        return func(*args, **(kwargs or {}))


def apart(model: torch.nn.Module, inputs: torch.Tensor) -> int:
    """Forward and backward with the weight gradients last; how many copies those made."""
    taps = StageTaps(model, plain_layer)
    taps.install()
    with taps.recording(0):
        model(inputs).sum().backward()
    with Copies() as copies:
        taps.compute(0)
    taps.remove()
    return copies.number


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_are_the_backwards_own_and_are_not_copied(microbatches: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4, bias=False))
    batch = [torch.randn(7, 6) for _ in range(microbatches)]
    for inputs in batch:
        model(inputs).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert sum(apart(model, inputs) for inputs in batch) == 0
    assert all(torch.equal(p.grad, of) for p, of in zip(model.parameters(), expected, strict=True))


def test_a_layer_that_is_called_twice_adds_up_first() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 5, bias=False)
    model, inputs = torch.nn.Sequential(layer, torch.nn.Tanh(), layer), torch.randn(7, 5)
    model(inputs).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    calls: list[int] = []
    layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    assert apart(model, inputs) == 0
    assert torch.equal(layer.weight.grad, expected)
    assert calls == [1]


def test_a_hook_sees_each_gradient_once_and_may_take_it_away() -> None:
    layer, taken = torch.nn.Linear(5, 5, bias=False), []

    def take(parameter: torch.nn.Parameter) -> None:
        taken.append(parameter.grad)
        parameter.grad = None

    layer.weight.register_post_accumulate_grad_hook(take)
    for _ in range(2):
        assert apart(layer, torch.ones(3, 5)) == 0
    assert torch.equal(taken[0], taken[1])
    assert taken[0] is not taken[1]
