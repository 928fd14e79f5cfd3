"""Gradients that other code asks for by name, on hosts whose weights must not be in the graph of a tapped call.

``torch.autograd.grad(loss, weight)`` finds the gradient of a weight only if the graph has an edge to it. But an edge
makes the hooks on the weight run in each backward, with None instead of a gradient. DDP and ZeRO would take this for
the gradient's arrival. The graph therefore has an edge to a *stand-in* of the weight. While a part of a microbatch
runs, torch's functions that are asked for the weight also ask for the stand-in.
Source: torch/autograd/__init__.py (``grad``, ``backward``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tf_adapters.overrides import Overrides
from tf_adapters.weight_gradients.tap_function import hand_over

_RUN = "_engine_run_backward"
"""The function through which both of torch's functions start a backward."""

INPUTS = 4
"""The place of the tensors that are asked for, in its arguments."""

ACCUMULATES = "accumulate_grad"
"""Its keyword that says whether gradients are accumulated, or returned."""

_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. "
    "Set allow_unused=True if this is the desired behavior."
)
"""Torch's own words."""


@contextmanager
def around_backwards(around: Callable[..., Any]) -> Iterator[None]:
    """Inside, a backward that Python code starts runs ``around`` with torch's own function and its arguments."""
    with Overrides() as overrides:
        if hasattr(torch.autograd, _RUN):
            overrides.wrap(torch.autograd, _RUN, around)
        yield


class StandIns:
    """The stand-ins of one stage's tapped weights."""

    def __init__(self) -> None:
        self._stand_ins: dict[torch.Tensor, torch.Tensor] = {}

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return a leaf of the parameter's shape. It takes no memory."""
        if parameter not in self._stand_ins:
            leaf = parameter.detach().new_empty(()).expand(parameter.shape).requires_grad_()
            self._stand_ins[parameter] = leaf
        return self._stand_ins[parameter]

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Run a part of a microbatch inside, in which other code may ask for the gradients of weights."""
        with around_backwards(self._run):
            yield

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = args[INPUTS] if len(args) > INPUTS else ()
        pairs = {place: self._stand_ins[t] for place, t in enumerate(inputs) if self._has(t)}
        if not pairs:
            return run(*args, **kwargs)
        more = (*args[:INPUTS], (*inputs, *pairs.values()))
        if kwargs[ACCUMULATES]:
            run(*more, *args[INPUTS + 1 :], **kwargs)
            for place, stand_in in pairs.items():
                _move_gradient(stand_in, inputs[place])
            return None
        allow_unused = args[INPUTS + 1]
        found = run(*more, True, **kwargs)
        return combined(found[: len(inputs)], dict(zip(pairs, found[len(inputs) :], strict=True)), allow_unused)

    def _has(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self._stand_ins


def _move_gradient(stand_in: torch.Tensor, weight: Any) -> None:
    """Accumulate what a backward has given to a stand-in into its weight, through the weight's hooks."""
    gradient, stand_in.grad = stand_in.grad, None
    if gradient is not None:
        values = [gradient.detach()]
        del gradient
        hand_over(values, weight)


def combined(
    own: Sequence[torch.Tensor | None], through: dict[int, torch.Tensor | None], allow_unused: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of tensors from their ``own`` edges and ``through`` stand-ins, by place."""
    found = list(own)
    for place, gradient in through.items():
        direct = found[place]
        if direct is None or gradient is None:
            found[place] = gradient if direct is None else direct
        else:
            found[place] = direct + gradient
    if not allow_unused and any(gradient is None for gradient in found):
        raise RuntimeError(_UNUSED)
    return tuple(found)
