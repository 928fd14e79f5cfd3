"""Backwards that ask for the weights of compiled blocks by name.

Our graph of a block has no gradient of its weights. If ``torch.autograd.grad``, or a backward with ``inputs``, asks for
one, the taps compute it at once. It is added to what torch has found by other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from tf_adapters.weight_gradients.compiled_tap import ANCHOR
from tf_adapters.weight_gradients.stand_ins import combined, inputs_of, run_with
from tf_adapters.weight_gradients.tap_function import hand_over
from tf_adapters.weight_gradients.tapped_layer import linear_gradient

_asked: list[dict[torch.Tensor, torch.Tensor | None]] = []
"""Of the backwards that run inside each other: the gradients that taps have computed, by weight."""


def asked_for(weights: Collection[torch.Tensor], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return those of the weights that a backward with these arguments asks for."""
    return [value for value in inputs_of(args) if isinstance(value, torch.Tensor) and value in weights]


def run_named(
    run: Callable[..., Any], asked: Collection[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run torch's backward, and add the gradients of the ``asked`` weights that taps compute."""
    gradients: dict[torch.Tensor, torch.Tensor | None] = dict.fromkeys(asked)
    _asked.append(gradients)
    try:  # the anchor lets every tap's backward run
        found = run_with([ANCHOR], run, args, kwargs)
    finally:
        _asked.pop()
    if found is None:
        for weight, gradient in gradients.items():
            if gradient is not None:
                hand_over([gradient], weight)  # type: ignore[arg-type]
        return None
    through = {place: gradients[value] for place, value in enumerate(inputs_of(args)) if value in gradients}
    return combined(args, found, through)


def collected(weight: torch.Tensor, inputs: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether the backward that runs asks for gradients by name. If it asks for this one, add it."""
    if not _asked:
        return False
    gradients = _asked[-1]
    if weight in gradients:
        own, before = linear_gradient(weight, inputs, gradient), gradients[weight]
        gradients[weight] = own if before is None else before + own
    return True
