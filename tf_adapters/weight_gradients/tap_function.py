"""The tap on a layer's output, as a function of autograd, and the way of a gradient into its parameter.

A tap's backward is reached in five ways:

    loss.backward()                               the gradient is kept for the weight gradient that comes later
    backward(inputs=...) or autograd.grad that    the weight gradient is computed at once and returned
        asks for the weight
    autograd.grad for something else              the tap only passes the gradient on
    with create_graph                             a graph from the input's gradient to the weights is added
    no gradient (None)                            nothing is kept, and nothing is passed on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Gradients = Sequence[torch.Tensor | None]


class TappedCall(Protocol):
    """What a tap does with one call of its layer. ``inputs`` and ``gradient`` are those of the layer's product."""

    def second_derivative(self) -> None:
        """Note that a backward has come that makes a graph."""

    def keep(self, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note them for the weight gradients: a backward has come that accumulates gradients."""

    def at_once(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Gradients:
        """Return the gradients of the call's parameters: they were asked for by name."""

    def input_gradient(self, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the input's gradient with a graph to the weights. ``gradient`` is a constant in this graph."""

    def with_graph(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Gradients:
        """Return the gradients of the call's parameters with a graph."""


class Tap(torch.autograd.Function):
    """The layer's output, unchanged.

    ``anchor`` requires gradients, so that the backward runs whether or not the layer's input does. Only a backward that
    accumulates gradients everywhere reaches the anchor. ``weights``, or their stand-ins, get gradients by name.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: TappedCall,
        inputs: torch.Tensor,
        output: torch.Tensor,
        anchor: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs)
        ctx.call = call
        return output.detach()  # no view of it: the host may change the outputs of its layers in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _, _, (anchor, _), *weights = ctx.next_functions
        to_inputs: torch.Tensor | None = None
        to_weights: Gradients = [None] * len(weights)
        if gradient is None:
            return None, None, None, None, *to_weights
        (inputs,) = ctx.saved_tensors
        accumulated, makes_graph = accumulates(anchor), torch.is_grad_enabled()
        if accumulated and not makes_graph:  # the usual case
            ctx.call.keep(inputs, gradient)
            return None, None, gradient, None, *to_weights
        wanted = [is_wanted(node) for node, _ in weights]
        if makes_graph:
            ctx.call.second_derivative()
            if inputs.requires_grad:
                to_inputs = _GraphOnly.apply(ctx.call.input_gradient(inputs, gradient))  # type: ignore[no-untyped-call]
            if any(wanted):
                to_weights = ctx.call.with_graph(inputs, gradient)
            elif accumulated:
                ctx.call.keep(inputs, gradient)
        elif any(wanted):
            to_weights = ctx.call.at_once(inputs, gradient)
        chosen = [value if asked else None for value, asked in zip(to_weights, wanted, strict=True)]
        return None, to_inputs, gradient, None, *chosen


class _GraphOnly(torch.autograd.Function):
    """Zeros with the graph of ``values``. Added to the input's gradient, they add this graph and change no value."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def apply(function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    """Return ``function.apply(*args)``, without its preparations for transforms of ``torch.func``: none may run."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


class Diverted(torch.autograd.Function):
    """A weight's ``values``, unchanged. The backward gives their gradient to ``take`` if it would be accumulated.

    In all other backwards ``named`` gets the gradient. Other code asks for the weight's gradient through ``named``.
    """

    @staticmethod
    def forward(
        ctx: Any, take: Callable[[torch.Tensor], None], values: torch.Tensor, named: torch.Tensor, anchor: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.take = take
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None, None]:
        anchor = ctx.next_functions[2][0]
        if gradient is None or torch.is_grad_enabled() or not accumulates(anchor):
            return None, None, gradient, None
        ctx.take(gradient)
        return None, None, None, None


class _HandOver(torch.autograd.Function):
    """Gives a parameter its first gradient in a backward, through all hooks.

    No other reference to the gradient exists. The parameter therefore takes the tensor itself, as in a host's own
    backward. It would copy a tensor that is passed to ``torch.autograd.backward``.
    """

    @staticmethod
    def forward(ctx: Any, gradient: list[torch.Tensor], parameter: torch.nn.Parameter) -> torch.Tensor:
        ctx.gradient = gradient
        return parameter.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.gradient.pop()


def hand_over(gradient: list[torch.Tensor], parameter: torch.nn.Parameter) -> None:
    """Accumulate the gradient, the only entry of the list, through the hooks on its parameter."""
    if parameter.grad is not None:
        _run_backward(parameter, gradient.pop())
        return
    with torch.enable_grad():
        node: torch.Tensor = apply(_HandOver, (gradient, parameter))
    _run_backward(node, node.detach())


def _run_backward(root: torch.Tensor, gradient: torch.Tensor) -> None:
    """Run ``torch.autograd.backward`` without its checks of the arguments, which take longer than the call itself.

    Source: megatron/core/pipeline_parallel/schedules.py (``custom_backward``).
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tensors=(root,),
        grad_tensors=(gradient,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def accumulates(node: Any) -> bool:
    """Return whether the running backward accumulates into the leaf of this AccumulateGrad ``node``.

    ``torch.autograd.grad`` does not, nor does a backward that names other inputs.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad for this leaf
        return False


def is_wanted(node: Any) -> bool:
    """Return whether the running backward accumulates into, or returns the gradient of, the leaf of this ``node``."""
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad for this leaf
        return True
