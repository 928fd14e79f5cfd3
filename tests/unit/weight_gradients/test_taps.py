"""Weight gradients that are computed apart reach their parameters as a backward's own would."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tf_adapters.weight_gradients.reasons import (
    ANOTHER_GRADIENT,
    CHANGES,
    NOT_PLAIN,
    OTHER_USES,
    SECOND_DERIVATIVE,
    TAKEN_AT_ONCE,
    USERS_HOOK,
)
from tf_adapters.weight_gradients.tapped_layer import plain_layer
from tf_adapters.weight_gradients.taps import StageTaps


class Copies(TorchDispatchMode):
    """Counts the copies that are made of tensors while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func._overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def own_forward() -> Iterator[None]:
    own = torch.nn.Linear.forward
    yield
    torch.nn.Linear.forward = own


def of_host(hook: Any) -> Any:
    """The same hook, as if a host had put it on a parameter: a layer with a hook of the user's has no tap."""
    hook.__module__ = "deepspeed.runtime"
    return hook


def apart(model: torch.nn.Module, inputs: torch.Tensor) -> int:
    """Forward and backward with the weight gradients last; how many copies those made."""
    taps = StageTaps(model, plain_layer, trusted=True)
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
    layer.weight.register_post_accumulate_grad_hook(of_host(lambda _: calls.append(1)))
    assert apart(model, inputs) == 0
    assert torch.equal(layer.weight.grad, expected)
    assert calls == [1]


def test_a_hook_sees_each_gradient_once_and_may_take_it_away() -> None:
    layer, taken = torch.nn.Linear(5, 5, bias=False), []

    def take(parameter: torch.nn.Parameter) -> None:
        taken.append(parameter.grad)
        parameter.grad = None

    layer.weight.register_post_accumulate_grad_hook(of_host(take))
    for _ in range(2):
        assert apart(layer, torch.ones(3, 5)) == 0
    assert torch.equal(taken[0], taken[1])
    assert taken[0] is not taken[1]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_weights_gradient_can_be_asked_for_by_name(by_name: bool) -> None:
    """No hook of a host on the weight runs before its gradient is accumulated."""
    layer, calls = torch.nn.Linear(5, 5, bias=False), []
    inputs = torch.randn(3, 5)
    (expected,) = torch.autograd.grad(layer(inputs).square().sum(), layer.weight)
    layer.weight.register_hook(of_host(calls.append))
    taps = StageTaps(layer, plain_layer, by_name=by_name, trusted=True)
    taps.install()
    with taps.recording(0):
        loss = layer(inputs).square().sum()
        for unused in (False, True):
            (found,) = torch.autograd.grad(loss, layer.weight, retain_graph=True, allow_unused=unused)
            assert torch.equal(found, expected)
        with pytest.raises(RuntimeError, match="allow_unused=True"):
            torch.autograd.grad(inputs.requires_grad_().sum(), layer.weight)
        loss.backward(inputs=[layer.weight], retain_graph=True)
        assert torch.equal(layer.weight.grad, expected)
        calls.clear()
        loss.backward()
    assert calls == []
    taps.compute(0)
    assert torch.equal(layer.weight.grad, 2 * expected)
    assert set(taps.take_surprises().values()) == {TAKEN_AT_ONCE}
    taps.remove()


class Product(torch.nn.Module):
    """Two linear layers, as a function of the test's choice uses them."""

    def __init__(self, use: Callable[[Product, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.use = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6), use

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


def with_forces(model: Product, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    energy = model.plain(x)
    (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
    return energy + 0.1 * force


def with_a_first_order_gradient(model: Product, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model.plain(x).sum(), x, retain_graph=True)
    return model.plain(x + 0.1 * slope)


def with_the_weight_apart(model: Product, x: torch.Tensor) -> torch.Tensor:
    return model.plain(x) + torch.nn.functional.linear(model.up(x), model.down.weight)


def with_a_computed_weight(model: Product, x: torch.Tensor) -> torch.Tensor:
    weight = model.up.weight * 2.0
    return model.down(torch.func.functional_call(model.up, {"weight": weight}, (x,)))


def with_vmap(model: Product, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(model.plain)(x)


def with_jvp(model: Product, x: torch.Tensor) -> torch.Tensor:
    value, slope = torch.func.jvp(model.plain, (x,), (torch.ones_like(x),))
    return value + 0.1 * slope


def with_vjp(model: Product, x: torch.Tensor) -> torch.Tensor:
    value, pull_back = torch.func.vjp(model.plain, x)
    return value + 0.1 * pull_back(torch.ones_like(value))[0]


def without_its_forward(model: Product, x: torch.Tensor) -> torch.Tensor:
    return model.down(torch.nn.functional.linear(x, model.up.weight, model.up.bias))


def with_a_penalty_on_a_weight(model: Product, x: torch.Tensor) -> torch.Tensor:
    return model.plain(x) + 1e-9 * model.up.weight.square().sum()


def with_another_order_of_dimensions(model: Product, x: torch.Tensor) -> torch.Tensor:
    return model.down(model.up(torch.stack([x, 2.0 * x]).transpose(0, 1)).tanh())


def step(model: torch.nn.Module, taps: StageTaps | None, batch: list[torch.Tensor], check: bool = False) -> None:
    """One step of several microbatches; weight gradients that are computed apart come last of each."""
    model.zero_grad()
    for microbatch, x in enumerate(batch):
        if taps is None:
            model(x.clone()).square().sum().backward()
            continue
        inside = taps.checking if check else taps.recording
        with inside(microbatch):
            loss = model(x.clone()).square().sum()
        with inside(microbatch):
            loss.backward()
        taps.compute(microbatch)


def under_autocast(model: Product, x: torch.Tensor) -> torch.Tensor:
    """The host keeps the cast input, so the input itself may change."""
    x = x * 1.0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.up(x)
        x.mul_(2.0)
        return model.down(torch.tanh(hidden))


def with_forces_under_autocast(model: Product, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        energy = model.plain(x)
    (force,) = torch.autograd.grad(energy.float().square().sum(), x, create_graph=True)
    return energy.float() + 0.1 * force


USES = [
    (Product.plain, set()),
    (under_autocast, set()),
    (with_forces_under_autocast, {SECOND_DERIVATIVE}),
    (with_forces, {SECOND_DERIVATIVE}),
    (with_a_first_order_gradient, set()),
    (with_the_weight_apart, {OTHER_USES}),
    (with_a_computed_weight, {OTHER_USES}),
    (with_vmap, {NOT_PLAIN}),
    (with_jvp, {NOT_PLAIN}),
    (with_vjp, {NOT_PLAIN}),
    (without_its_forward, {OTHER_USES}),
    (with_a_penalty_on_a_weight, {OTHER_USES}),
    (with_another_order_of_dimensions, {NOT_PLAIN}),
]


@pytest.mark.parametrize(("use", "reasons"), USES, ids=[use.__name__ for use, _ in USES])
def test_a_use_that_a_tap_does_not_understand_is_left_to_the_host(use: Any, reasons: set[str]) -> None:
    torch.manual_seed(0)
    model, batch = Product(use), [torch.randn(5, 6) for _ in range(3)]
    step(model, None, batch)
    expected = {name: p.grad for name, p in model.named_parameters()}
    hooks = {name: p._backward_hooks for name, p in model.named_parameters()}
    taps = StageTaps(model, plain_layer)
    taps.install()
    try:
        step(model, taps, batch, check=True)
        assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
        found = taps.end_check()
        assert set(found.values()) == reasons
        taps.leave(found)
        assert taps.names == {"up.weight", "down.weight"} - found.keys()
        step(model, taps, batch)
        assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
    finally:
        taps.remove()
    assert {name: p._backward_hooks for name, p in model.named_parameters()} == hooks


def test_a_second_derivative_of_a_tapped_layer_is_taken_under_the_forwards_autocast() -> None:
    torch.manual_seed(0)
    model, batch = Product(with_forces_under_autocast), [torch.randn(5, 6) for _ in range(3)]
    step(model, None, batch)
    expected = {name: p.grad for name, p in model.named_parameters()}
    taps = StageTaps(model, plain_layer, trusted=True)
    taps.install()
    step(model, taps, batch)
    taps.remove()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=0.02, atol=0.02), name  # bfloat16 rounds


def test_a_complex_layer_has_no_tap() -> None:
    assert plain_layer(torch.nn.Linear(3, 3, dtype=torch.cfloat)) is None


def rounded(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x + (x.round() - x).detach(), layer.weight, layer.bias)


@pytest.mark.parametrize(("after", "reason"), [(False, ANOTHER_GRADIENT), (True, OTHER_USES)])
def test_a_function_in_place_of_a_layers_forward_is_found_out(monkeypatch: Any, after: bool, reason: str) -> None:
    model = Product(Product.plain)
    taps = StageTaps(model, plain_layer)
    if after:
        taps.install()
    monkeypatch.setattr(torch.nn.Linear, "forward", rounded)
    if not after:
        taps.install()
    step(model, taps, [torch.randn(5, 6)], check=True)
    assert set(taps.end_check().values()) == {reason}
    taps.remove()
    assert torch.nn.Linear.forward is rounded


def test_a_function_around_a_layers_forward_leaves_the_tap_inside(monkeypatch: Any) -> None:
    model = Product(Product.plain)
    taps = StageTaps(model, plain_layer)
    taps.install()
    inside = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: inside(self, x).square())
    step(model, taps, [torch.randn(5, 6)], check=True)
    assert taps.end_check() == {}
    monkeypatch.undo()
    taps.remove()


def test_a_model_that_is_dropped_with_its_taps_leaves_the_class_as_it_was() -> None:
    own = torch.nn.Linear.forward
    model = Product(Product.plain)
    taps = StageTaps(model, plain_layer)
    taps.install()
    assert torch.nn.Linear.forward is not own
    del model, taps
    gc.collect()
    assert torch.nn.Linear.forward is own


@pytest.mark.parametrize("users", [False, True])
def test_hooks_on_a_parameter_do_not_disturb_the_check(users: bool) -> None:
    model, seen = Product(Product.plain), []

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5

    def note_it(parameter: torch.nn.Parameter) -> None:
        seen.append(parameter)

    model.up.weight.register_hook(halve if users else of_host(halve))
    model.up.weight.register_post_accumulate_grad_hook(note_it if users else of_host(note_it))
    taps = StageTaps(model, plain_layer)
    taps.install()
    step(model, taps, [torch.randn(5, 6)], check=True)
    assert taps.end_check() == ({"up.weight": USERS_HOOK} if users else {})
    assert len(seen) == 1
    assert len(model.up.weight._backward_hooks or ()) == 1
    taps.remove()


def test_weights_that_change_within_a_batch_are_left_to_the_host() -> None:
    model = Product(Product.plain)

    def update(parameter: torch.nn.Parameter) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)

    model.up.weight.register_post_accumulate_grad_hook(of_host(update))
    taps = StageTaps(model, plain_layer)
    taps.install()
    step(model, taps, [torch.randn(5, 6) for _ in range(2)], check=True)
    assert taps.end_check() == {"up.weight": CHANGES}
    taps.remove()


def test_a_copy_of_a_tapped_model_is_a_model_of_its_own() -> None:
    model, x = Product(Product.plain), torch.randn(5, 6)
    keys, kinds = list(model.state_dict()), [type(part) for part in model.modules()]
    taps = StageTaps(model, plain_layer)
    taps.install()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    assert list(model.state_dict()) == keys
    for other in copies:
        assert [type(part) for part in other.modules()] == kinds
        assert torch.equal(other(x), model(x))
        for parameter in other.parameters():
            parameter.data.zero_()
        assert not other(x).any()
        with taps.recording(0):
            other(x).sum().backward()
        assert all(parameter.grad is not None for parameter in other.parameters())
        assert all(parameter.grad is None for parameter in model.parameters())
    assert model(x).any()
    taps.remove()
    assert [type(part) for part in model.modules()] == kinds


def test_a_forward_that_somebody_wraps_after_attaching_goes_on_working() -> None:
    model, x = Product(Product.plain), torch.randn(5, 6)
    taps = StageTaps(model, plain_layer)
    taps.install()
    inside = model.up.forward
    model.up.forward = lambda *args: 2.0 * inside(*args)  # as accelerate does it
    taps.remove()
    assert type(model.up) is torch.nn.Linear
    assert torch.equal(model.up(x), 2.0 * torch.nn.functional.linear(x, model.up.weight, model.up.bias))
