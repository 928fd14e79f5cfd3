"""Signal and noise of a gradient, from its microbatches, against what is known of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tf_adapters.measuring.learning import SAMPLED_AT, Learning, Probe
from tf_adapters.measuring.token_cost import TokenCost
from tf_adapters.weight_gradients import gradient_noise
from tf_adapters.weight_gradients.gradient_noise import GradientNoise
from tf_adapters.weight_gradients.tapped_layer import plain_layer
from tf_adapters.weight_gradients.taps import StageTaps
from tf_adapters.weight_gradients.tokens import TokenSampler

MICROBATCHES = 4


def backwards(weight: nn.Parameter, gradients: torch.Tensor) -> None:
    """One backward for each gradient of ``weight``."""
    for gradient in gradients:
        (weight * gradient).sum().backward()


def probe_of(weight: nn.Parameter, gradients: torch.Tensor) -> dict[int, tuple[Probe, ...]]:
    noise = GradientNoise({0: {"weight": weight}})
    noise.begin()
    backwards(weight, gradients)
    noise.end(len(gradients))
    return noise.probes()


def test_a_probe_has_the_variance_between_microbatches_and_the_square_of_the_mean():
    torch.manual_seed(0)
    mean, spread = torch.randn(20, 30), 3.0
    probes = [
        probe_of(nn.Parameter(torch.zeros(20, 30)), mean + spread * torch.randn(MICROBATCHES, 20, 30))[0][0]
        for _ in range(200)
    ]
    assert sum(probe.noise for probe in probes) / 200 == pytest.approx(spread**2 * mean.numel(), rel=0.02)
    assert sum(probe.signal for probe in probes) / 200 == pytest.approx(float(mean.square().sum()), rel=0.05)


def test_of_a_large_weight_some_elements_are_looked_at(monkeypatch):
    monkeypatch.setattr(gradient_noise, "_ELEMENTS", 100)
    gradients = torch.randn(MICROBATCHES, 20, 30)
    (probe,) = probe_of(nn.Parameter(torch.zeros(20, 30)), gradients)[0]
    sample = gradients.reshape(MICROBATCHES, -1)[:, ::6]
    assert probe.noise == pytest.approx(float(sample.var(0).sum()), rel=1e-4)


def test_looking_changes_no_gradient_and_ends_with_the_step():
    weight, gradients = nn.Parameter(torch.zeros(3, 3)), torch.randn(MICROBATCHES, 3, 3)
    noise = GradientNoise({0: {"weight": weight}})
    noise.begin()
    backwards(weight, gradients)
    noise.end(MICROBATCHES)
    torch.testing.assert_close(weight.grad, gradients.sum(0))
    backwards(weight, gradients)
    assert len(noise.probes()[0]) == 1
    noise.begin()
    noise.abandon()
    noise.end(MICROBATCHES)
    assert len(noise.probes()[0]) == 1


@pytest.mark.parametrize("missing", [1, MICROBATCHES])
def test_a_step_whose_microbatches_were_not_all_seen_apart_is_no_probe(missing):
    weight = nn.Parameter(torch.zeros(3, 3))
    noise = GradientNoise({0: {"weight": weight}})
    noise.begin()
    backwards(weight, torch.randn(MICROBATCHES - missing, 3, 3))
    noise.end(MICROBATCHES)
    assert noise.probes() == {0: ()}


def test_what_overflows_or_was_accumulated_elsewhere_is_no_probe():
    assert probe_of(nn.Parameter(torch.zeros(3, 3)), torch.full((MICROBATCHES, 3, 3), torch.inf)) == {0: ()}
    fused = nn.Parameter(torch.zeros(3, 3))
    fused.grad_added_to_main_grad = True
    assert probe_of(fused, torch.randn(MICROBATCHES, 3, 3)) == {0: ()}


def fused_backwards(weight: nn.Parameter, gradients: torch.Tensor) -> None:
    """As a fused kernel: each gradient is added to ``main_grad``, and autograd gets a dummy."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            ctx.gradient = gradient
            return value.sum()

        @staticmethod
        def backward(ctx: Any, output: torch.Tensor) -> tuple[torch.Tensor, None]:
            weight.main_grad += ctx.gradient
            weight.grad_added_to_main_grad = True
            return torch.empty_like(weight), None

    for gradient in gradients:
        Fused.apply(weight, gradient).backward()


def test_fused_accumulation_shows_the_same_probe():
    gradients = torch.randn(MICROBATCHES, 20, 30)
    fused = nn.Parameter(torch.zeros(20, 30))
    fused.main_grad = torch.ones(20, 30)  # what an earlier batch of the step has left
    noise = GradientNoise({0: {"weight": fused}})
    noise.begin()
    fused_backwards(fused, gradients)
    noise.end(MICROBATCHES)
    (seen,), (plain,) = noise.probes()[0], probe_of(nn.Parameter(torch.zeros(20, 30)), gradients)[0]
    assert (seen.signal, seen.noise) == pytest.approx((plain.signal, plain.noise), rel=1e-4)


@pytest.mark.parametrize("how", [{"dtype": torch.bfloat16}, {"overwritten": True}])
def test_sums_that_do_not_show_single_microbatches_are_no_probe(how):
    fused = nn.Parameter(torch.zeros(3, 3))
    fused.main_grad = torch.zeros(3, 3, dtype=how.get("dtype", torch.float32))
    fused.overwrite_main_grad = how.get("overwritten", False)
    noise = GradientNoise({0: {"weight": fused}})
    noise.begin()
    fused_backwards(fused, torch.randn(MICROBATCHES, 3, 3))
    noise.end(MICROBATCHES)
    assert noise.probes() == {0: ()}


def test_a_few_matrices_of_many_are_looked_at():
    weights = {f"{n}": nn.Parameter(torch.zeros(2, 2)) for n in range(40)}
    spread = gradient_noise.chosen_weights({**weights, "bias": nn.Parameter(torch.zeros(2))})
    assert list(spread) == ["0", "5", "10", "15", "20", "25", "30", "35"]
    assert GradientNoise({0: {"bias": nn.Parameter(torch.zeros(2))}}).probes() == {}


def test_the_noise_of_draws_is_what_draws_show():
    torch.manual_seed(1)
    layer = nn.Linear(12, 10)
    stage = nn.Sequential(layer)
    taps = StageTaps(stage, plain_layer, trusted=True)
    taps.install()
    noise = GradientNoise({0: {"0.weight": layer.weight}})
    inputs, gradients = torch.randn(2, 400, 12), torch.randn(2, 400, 10) * torch.rand(2, 400, 1) ** 3

    def weight_gradient(microbatch: int, sampler) -> torch.Tensor:
        layer.weight.grad = None
        with taps.recording(microbatch):
            stage(inputs[microbatch]).backward(gradients[microbatch])
        taps.compute(microbatch, sampler)
        return layer.weight.grad

    noise.begin()
    whole = [weight_gradient(microbatch, noise.observer(0)) for microbatch in range(2)]
    noise.end(2)
    missed = [
        float((weight_gradient(m, TokenSampler((draw, m), lambda _: SAMPLED_AT)) - whole[m]).square().sum())
        for draw in range(300)
        for m in range(2)
    ]
    taps.remove()
    (probe,) = noise.probes()[0]
    assert probe.draws == pytest.approx(sum(missed) / len(missed), rel=0.15)


def test_what_is_learnt_from_the_probes_of_all_ranks():
    ranks = [{0: [Probe(2.0, 8.0, 6.0), Probe(1.0, 10.0, 3.0)]}, {1: [Probe(-1.0, 4.0, 0.0), Probe(0.5, 4.0, 0.0)]}]
    learning = Learning.measured(ranks, batch=9, costs={0: TokenCost(0.1, 1.0)})
    assert learning is not None
    first, second = learning.stages[0], learning.stages[1]
    assert first.signal == pytest.approx(3.0 / (3.0 + 18.0 / 9))
    assert first.draws == pytest.approx(9.0 / 18.0 / 3.0)
    assert 0.0 < first.error < 0.5
    assert (second.signal, second.draws) == (0.0, None)  # an estimate below 0 is no signal
    assert Learning.from_json(learning.to_json()) == learning
    assert Learning.measured([*ranks, {2: []}], 9, {}) is None  # a stage that cannot be seen
