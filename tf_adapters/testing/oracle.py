"""The expected gradients of masked training: full gradients of an ordinary copy of the model, masked and averaged.

With sampled tokens, each token counts with the weight of its draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from tf_adapters.overrides import Overrides
from tf_adapters.weight_gradients.tokens import TokenSample, TokenSampler


class Sampled(NamedTuple):
    """The weight of each token's own part, ``[tokens]``, and the part that inputs have in common, ``[inputs]``."""

    scales: torch.Tensor
    common: torch.Tensor

    def counted(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the weighted ``inputs`` of a weight's gradient."""
        scales = self.scales.to(inputs.dtype).reshape(*inputs.shape[:-1], 1)
        return (self.common + scales * (inputs.detach() - self.common)).to(inputs.dtype)


Samples = Mapping[str, Sampled]
"""Samples by name of a linear layer's weight."""

Draws = dict[tuple[int, int, int], dict[str, Sampled]]
"""A rank's samples by (step, stage, microbatch)."""


def masked_gradients(
    model: torch.nn.Module,
    microbatches: Iterable[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    frozen: Callable[[int], Collection[str]],
    gradient_scale: str = "skipped_as_zero",
    samples: Callable[[int], Samples] = lambda microbatch: {},
) -> dict[str, torch.Tensor]:
    """Return the mean over microbatches of (mask x full gradient), by parameter name: delta = 1/M sum(U_m * g_m).

    With ``gradient_scale`` "computed_mean" the mean is over the unmasked microbatches; zero if all are masked.

    Args:
        model: an ordinary single-process copy of the whole model, nothing frozen.
        microbatches: inputs and labels, in order.
        loss_fn: returns the scalar loss of outputs and labels.
        frozen: returns the names that microbatch m freezes.
        samples: returns the samples of microbatch m by name. Weights without a sample count every token once.
    """
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    computed: Counter[str] = Counter()
    count = 0
    for m, (inputs, labels) in enumerate(microbatches):
        model.zero_grad(set_to_none=True)
        with sampled_tokens(model, samples(m)):
            torch.autograd.backward(loss_fn(model(inputs), labels))
        masked = set(frozen(m))
        for name, parameter in model.named_parameters():
            if name not in masked:
                computed[name] += 1
                total[name] += 0 if parameter.grad is None else parameter.grad
        count += 1
    if gradient_scale == "skipped_as_zero":
        computed = Counter(dict.fromkeys(total, count))
    return {name: gradient / max(1, computed[name]) for name, gradient in total.items()}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64; the absolute error if ``expected`` is zero."""
    difference = float(torch.linalg.vector_norm(actual.double() - expected.double()))
    size = float(torch.linalg.vector_norm(expected.double()))
    return difference / size if size > 0 else difference


@contextmanager
def recorded_draws() -> Iterator[Draws]:
    """Record the draws of this rank's samplers inside the block."""
    draws: Draws = {}
    sample = TokenSampler.sample

    def recording(sampler: TokenSampler, weight: str, inputs: torch.Tensor, gradient: Any) -> TokenSample | None:
        drawn = sample(sampler, weight, inputs, gradient)
        if drawn is not None:
            _, step, stage, microbatch = sampler.key
            scales = drawn.scales.new_zeros(len(inputs)).index_add_(0, drawn.chosen, drawn.scales)
            draws.setdefault((step, stage, microbatch), {})[weight] = Sampled(scales, drawn.common)
        return drawn

    with patch.object(TokenSampler, "sample", recording):
        yield draws


@contextmanager
def sampled_tokens(model: torch.nn.Module, samples: Samples) -> Iterator[None]:
    """Weight tokens by ``samples`` in the weight gradients of a model's torch.nn.Linear layers."""
    with Overrides() as overrides:
        for name, of_weight in samples.items():
            layer = model.get_submodule(name.removesuffix(".weight"))
            overrides.set(layer, "forward", partial(_forward, layer, of_weight))
        yield


def _forward(layer: Any, sampled: Sampled, inputs: torch.Tensor) -> torch.Tensor:
    linear = torch.nn.functional.linear
    output = of_other_gradient(linear(inputs, layer.weight.detach()), linear(sampled.counted(inputs), layer.weight))
    return output if layer.bias is None else output + layer.bias


def of_other_gradient(output: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return ``output``, whose backward also computes the gradients of ``counted``."""
    return output + (counted - counted.detach())
