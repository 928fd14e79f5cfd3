"""What masked training must compute: full gradients of an ordinary copy of the model, masked, then averaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch


def masked_gradients(
    model: torch.nn.Module,
    microbatches: Iterable[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    frozen: Callable[[int], Collection[str]],
    gradient_scale: str = "skipped_as_zero",
) -> dict[str, torch.Tensor]:
    """The mean over microbatches of (mask x full gradient), by parameter name: delta = 1/M sum(U_m * g_m).

    With ``gradient_scale`` "computed_mean" over those that are not masked, zero where all are.

    Args:
        model: an ordinary single-process copy of the whole model, nothing frozen.
        microbatches: inputs and labels, in order.
        loss_fn: loss of outputs and labels, a scalar.
        frozen: names whose gradient microbatch m does not contribute to.
        gradient_scale: the setting.
    """
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    computed: Counter[str] = Counter()
    count = 0
    for m, (inputs, labels) in enumerate(microbatches):
        model.zero_grad(set_to_none=True)
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
