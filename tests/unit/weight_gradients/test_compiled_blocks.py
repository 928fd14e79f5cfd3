"""Taps inside compiled layers: the compiled host's gradients to the bit, and what is left to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from tf_adapters.weight_gradients.reasons import HAS_STATE, OTHER_USES, TAKEN_AT_ONCE, USERS_HOOK
from tf_adapters.weight_gradients.tapped_layer import plain_layer
from tf_adapters.weight_gradients.taps import StageTaps

WIDTH, TOKENS, MICROBATCHES = 16, 6, 3
NAMES = [f"{block}.{layer}.weight" for block in range(2) for layer in ("up", "down")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(functional.gelu(self.up(self.norm(x)))))


class Counting(Block):
    """Counts its calls in a buffer, as mixtures of experts count tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Remembering(Block):
    """Sets an attribute in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.shape[0]
        return super().forward(x)


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def model_of(kind: type[Block], backend: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind(), nn.Linear(WIDTH, 4))
    for block in (model[0], model[1]):
        block.compile(backend=backend, fullgraph=True)
    return model


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Pair:
    """The same compiled model twice: one with taps."""

    def __init__(self, kind: type[Block] = Block, backend: str = "aot_eager", loss: Loss = mean_square) -> None:
        self.host, self.ours, self.loss = model_of(kind, backend), model_of(kind, backend), loss
        self.taps = StageTaps(self.ours, plain_layer, by_name=True, sole=True)
        self.taps.install()

    def step(
        self, model: nn.Module, around: Callable[[int], Any] = lambda _: nullcontext(), tokens: int = TOKENS
    ) -> Any:
        """Forwards, then backwards. Return the gradients."""
        torch.manual_seed(1)
        model.zero_grad()
        losses = []
        for microbatch in range(MICROBATCHES):
            x = torch.randn(2, tokens, WIDTH)
            with around(microbatch):
                losses.append(self.loss(model, x))
        for microbatch, loss in enumerate(losses):
            with around(microbatch):
                loss.backward()
        return model

    def check(self) -> dict[str, str]:
        """Run the step that is checked. Return the layers that are left to the host."""
        self.taps.begin_batch()
        self.step(self.ours, self.taps.checking)
        reasons = self.taps.end_check()
        self.taps.leave(reasons)
        return reasons

    def deferred(self, tokens: int = TOKENS) -> int:
        """Run a step with deferred weight gradients. Return how many of the last microbatch's calls have waited."""
        self.taps.begin_batch()
        self.step(self.ours, self.taps.recording, tokens)
        waited = len(self.taps._pending.get(MICROBATCHES - 1, ()))
        for microbatch in self.taps.pending:
            self.taps.compute(microbatch)
        return waited

    def assert_same(self, tokens: int = TOKENS) -> None:
        self.step(self.host, tokens=tokens)
        for (name, ours), theirs in zip(self.ours.named_parameters(), self.host.parameters(), strict=True):
            assert ours.grad is not None
            assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_deferred_gradients_are_the_compiled_hosts(backend: str) -> None:
    pair = Pair(backend=backend)
    assert pair.check() == {}
    compiled = counters["stats"]["unique_graphs"]
    for _ in range(3):
        assert pair.deferred() == len(NAMES) + 1
        pair.assert_same()
    assert counters["stats"]["unique_graphs"] == compiled
    pair.taps.remove()
    pair.step(pair.ours)
    pair.assert_same()


def test_other_shapes_than_in_the_check_are_the_hosts() -> None:
    pair = Pair()
    pair.check()
    assert pair.deferred(tokens=TOKENS + 1) == 1  # the layer that is not compiled
    pair.assert_same(tokens=TOKENS + 1)


def test_the_check_leaves_buffers_as_they_are() -> None:
    pair = Pair(Counting)
    assert pair.check() == {}
    assert pair.deferred() == len(NAMES) + 1
    assert [int(block.calls) for block in pair.ours[:2]] == [2 * MICROBATCHES] * 2


def test_blocks_that_set_attributes_are_left_to_the_host() -> None:
    pair = Pair(Remembering)
    assert pair.check() == dict.fromkeys(NAMES, HAS_STATE)
    assert pair.deferred() == 1
    pair.assert_same()


def test_a_weight_that_the_loss_uses_too_is_left_to_the_host() -> None:
    pair = Pair(loss=lambda model, x: mean_square(model, x) + model[0].up.weight.square().sum())
    assert pair.check()["0.up.weight"] == OTHER_USES
    pair.deferred()
    pair.assert_same()


def test_weights_with_hooks_are_left_to_the_host() -> None:
    pair = Pair()
    pair.ours[0].down.weight.register_hook(lambda gradient: gradient)
    assert pair.check()["0.down.weight"] == USERS_HOOK
    pair.deferred()
    pair.assert_same()


def with_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = mean_square(model, x)
    (gradient,) = torch.autograd.grad(loss, [model[0].up.weight], retain_graph=True)
    return loss * gradient.detach().norm()


def test_weights_whose_gradient_is_asked_for_are_left_to_the_host() -> None:
    with torch._functorch.config.patch(donated_buffer=False):
        pair = Pair(loss=with_penalty)
        assert pair.check()["0.up.weight"] == TAKEN_AT_ONCE
        pair.deferred()
        pair.assert_same()


def test_gradients_that_are_asked_for_later_are_the_hosts() -> None:
    with torch._functorch.config.patch(donated_buffer=False):
        pair = Pair()
        pair.check()
        pair.loss = with_penalty
        pair.deferred()
        pair.assert_same()
        assert pair.taps.take_surprises()["0.up.weight"] == TAKEN_AT_ONCE


def test_a_backward_for_an_input_keeps_nothing() -> None:
    pair = Pair()
    pair.check()
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    pair.step(pair.ours, pair.taps.recording)  # compiles the graph for inputs without gradients
    pair.taps.begin_batch()
    with pair.taps.recording(0):
        torch.autograd.grad(mean_square(pair.ours, x), [x])
    assert pair.taps.pending == ()


def test_named_inputs_of_a_backward_accumulate() -> None:
    pair = Pair()
    pair.check()
    x = torch.randn(2, TOKENS, WIDTH)
    for model, around in ((pair.host, nullcontext()), (pair.ours, pair.taps.recording(0))):
        model.zero_grad()
        torch.manual_seed(2)
        with around:
            mean_square(model, x).backward(inputs=[model[1].down.weight])
    assert pair.taps.pending == ()
    assert torch.equal(pair.ours[1].down.weight.grad, pair.host[1].down.weight.grad)
    assert pair.ours[0].down.weight.grad is None


def test_evaluation_and_copies_have_nothing_of_ours() -> None:
    import copy

    pair = Pair()
    pair.check()
    x = torch.randn(2, TOKENS, WIDTH)
    with torch.no_grad(), pair.taps.recording(0):
        pair.ours.eval()
        assert torch.equal(pair.ours(x), pair.host.eval()(x))
    twin = copy.deepcopy(pair.ours[2])
    assert vars(twin).keys() == vars(pair.ours[2]).keys()
    before = vars(pair.host[0])["_compiled_call_impl"]
    pair.taps.remove()
    assert type(vars(pair.ours[0])["_compiled_call_impl"]) is type(before)
