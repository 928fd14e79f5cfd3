"""What masked training must compute: full gradients of an ordinary copy of the model, masked, then averaged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch


def masked_gradients(
    model: torch.nn.Module,
    microbatches: Iterable[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    frozen: Callable[[int], Collection[str]],
) -> dict[str, torch.Tensor]:
    """The mean over microbatches of (mask x full gradient), by parameter name: delta = 1/M sum(U_m * g_m).

    Args:
        model: an ordinary single-process copy of the whole model, nothing frozen.
        microbatches: inputs and labels, in order.
        loss_fn: loss of outputs and labels, a scalar.
        frozen: names whose gradient microbatch m does not contribute to.
    """
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    count = 0
    for m, (inputs, labels) in enumerate(microbatches):
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss_fn(model(inputs), labels))
        masked = set(frozen(m))
        for name, parameter in model.named_parameters():
            if name not in masked and parameter.grad is not None:
                total[name] += parameter.grad
        count += 1
    return {name: gradient / count for name, gradient in total.items()}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64; the absolute error where nothing is expected."""
    difference = float(torch.linalg.vector_norm(actual.double() - expected.double()))
    size = float(torch.linalg.vector_norm(expected.double()))
    return difference / size if size > 0 else difference
