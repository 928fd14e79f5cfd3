"""The tap that torch.compile traces into a compiled layer.

A compiled layer computes with ``weight.detach()``, and its output passes a function of autograd whose backward calls
the operator ``tf_adapters::keep``. The compiled backward therefore has no weight gradient, and gives the operator what
the weight gradient needs. The operator has an effect, so the compiler neither drops it nor changes the order of two.
The storage of the weight says which layer it is: blocks of one shape share one graph.
Source: torch/_higher_order_ops/effects.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Keep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes a product's inputs, its output's gradient and its weight, in a backward."""

ANCHOR = torch.zeros(0, requires_grad=True)
"""An input of each graph, so that a tap's backward runs. Only a backward that accumulates everywhere reaches it."""


@cache  # torch forgets an operator with its library
def operator(keep: Keep) -> torch.library.Library | None:
    """Define the operator, which calls ``keep``. Return its library; None if torch has no operators with an effect."""
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    except ImportError:
        return None
    library = torch.library.Library("tf_adapters", "DEF")  # type: ignore[no-untyped-call]
    library.define("keep(Tensor inputs, Tensor gradient, Tensor weight) -> ()")  # type: ignore[no-untyped-call]
    library.impl("keep", keep, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("tf_adapters::keep", _keep_nothing, lib=library)
    _register_effectful_op(torch.ops.tf_adapters.keep.default, _EffectType.ORDERED)
    return library


def _keep_nothing(inputs: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> None:
    """What the operator does while a graph is traced."""


class _CompiledTap(torch.autograd.Function):
    """The layer's output, unchanged. Its backward gives the operator the gradient of the output."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, output: torch.Tensor, weight: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        inputs, weight = ctx.saved_tensors
        torch.ops.tf_adapters.keep(inputs, gradient, weight)
        return None, gradient, None, None


class CompiledLinear(torch.nn.Linear):
    """A linear layer with the tap inside, as the compiler sees it. It shares all attributes of the host's layer."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight.detach()
        output = torch.nn.functional.linear(inputs, weight, self.bias)
        multiplied = inputs.detach()
        if multiplied.dtype != output.dtype:  # autocast: the host keeps this copy, not the input
            multiplied = multiplied.to(output.dtype)
        tapped: torch.Tensor = _CompiledTap.apply(multiplied, output, weight, ANCHOR)  # type: ignore[no-untyped-call]
        return tapped
