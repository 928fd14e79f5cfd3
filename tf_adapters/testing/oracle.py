"""What masked training must compute: full gradients of an ordinary copy of the model, masked, then averaged.

With sampled tokens: gradients in which each token counts as often as its draw says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tf_adapters.masking.tokens import Chosen, TokenSampler
from tf_adapters.overrides import Overrides

Scales = Mapping[str, torch.Tensor]
"""By name of a linear layer's weight, how often each token ``[tokens]`` counts in its gradient."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of inputs and a weight."""

Draws = dict[tuple[int, int, int], dict[str, torch.Tensor]]
"""The scales that a rank has drawn, by (step, stage, microbatch)."""


def masked_gradients(
    model: torch.nn.Module,
    microbatches: Iterable[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    frozen: Callable[[int], Collection[str]],
    gradient_scale: str = "skipped_as_zero",
    scales: Callable[[int], Scales] = lambda microbatch: {},
) -> dict[str, torch.Tensor]:
    """The mean over microbatches of (mask x full gradient), by parameter name: delta = 1/M sum(U_m * g_m).

    With ``gradient_scale`` "computed_mean" over those that are not masked, zero where all are.

    Args:
        model: an ordinary single-process copy of the whole model, nothing frozen.
        microbatches: inputs and labels, in order.
        loss_fn: loss of outputs and labels, a scalar.
        frozen: names whose gradient microbatch m does not contribute to.
        gradient_scale: the setting.
        scales: of microbatch m, by name; a weight that it lacks counts every token once.
    """
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    computed: Counter[str] = Counter()
    count = 0
    for m, (inputs, labels) in enumerate(microbatches):
        model.zero_grad(set_to_none=True)
        with scaled_tokens(model, scales(m)):
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
    """``|actual - expected| / |expected|`` in float64; the absolute error where nothing is expected."""
    difference = float(torch.linalg.vector_norm(actual.double() - expected.double()))
    size = float(torch.linalg.vector_norm(expected.double()))
    return difference / size if size > 0 else difference


@contextmanager
def recorded_draws() -> Iterator[Draws]:
    """What this rank's samplers draw inside the block."""
    draws: Draws = {}
    choose = TokenSampler.choose

    def recording(sampler: TokenSampler, weight: str, sizes: torch.Tensor, count: int) -> Chosen:
        chosen, scales = choose(sampler, weight, sizes, count)
        _, step, stage, microbatch = sampler.key
        counted = scales.new_zeros(sizes.shape).index_add_(0, chosen, scales)
        draws.setdefault((step, stage, microbatch), {})[weight] = counted
        return chosen, scales

    with patch.object(TokenSampler, "choose", recording):
        yield draws


@contextmanager
def scaled_tokens(model: torch.nn.Module, scales: Scales) -> Iterator[None]:
    """Count tokens as ``scales`` says in the weight gradients of a model's torch.nn.Linear layers."""
    with Overrides() as overrides:
        for name, of_weight in scales.items():
            layer = model.get_submodule(name.removesuffix(".weight"))
            overrides.set(layer, "forward", partial(_forward, layer, of_weight))
        yield


def _forward(layer: Any, scales: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    output = product_with_scaled_tokens(torch.nn.functional.linear, inputs, layer.weight, scales)
    return output if layer.bias is None else output + layer.bias


def product_with_scaled_tokens(
    product: Product, inputs: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """``product(inputs, weight)``, in whose gradient for ``weight`` a token counts as often as ``scales`` says."""
    own = _ScaleGradient.apply(product(inputs.detach(), weight), scales)  # type: ignore[no-untyped-call]
    output: torch.Tensor = product(inputs, weight.detach()) + (own - own.detach())
    return output


class _ScaleGradient(torch.autograd.Function):
    """A product as it is, whose gradient is scaled token by token."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scales)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scales,) = ctx.saved_tensors
        return gradient * scales.to(gradient.dtype).reshape(*gradient.shape[:-1], 1), None
