"""Gradients that other code asks for by name, on hosts whose weights must not be in the graph of a tapped call.

``torch.autograd.grad(loss, weight)`` finds the gradient of a weight only if the graph has an edge to it. But an edge
makes the hooks on the weight run in each backward, with None instead of a gradient. DDP and ZeRO would take this for
the gradient's arrival. The graph therefore has an edge to a *stand-in* of the weight. While a part of a microbatch
runs, torch's functions that are asked for the weight also ask for the stand-in.
Source: torch/autograd/__init__.py (``grad``, ``backward``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tf_adapters.overrides import Overrides
from tf_adapters.weight_gradients.tap_function import hand_over

_RUN = "_engine_run_backward"
"""The function through which both of torch's functions start a backward."""

_INPUTS = 4
"""The place of the tensors that are asked for, in its arguments."""

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
        inputs = inputs_of(args)
        pairs = {place: self._stand_ins[t] for place, t in enumerate(inputs) if self._has(t)}
        if not pairs:
            return run(*args, **kwargs)
        found = run_with(pairs.values(), run, args, kwargs)
        if found is None:
            for place, stand_in in pairs.items():
                _move_gradient(stand_in, inputs[place])
            return None
        return combined(args, found, dict(zip(pairs, found[len(inputs) :], strict=True)))

    def _has(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self._stand_ins


def _move_gradient(stand_in: torch.Tensor, weight: Any) -> None:
    """Accumulate what a backward has given to a stand-in into its weight, through the weight's hooks."""
    gradient, stand_in.grad = stand_in.grad, None
    if gradient is not None:
        values = [gradient.detach()]
        del gradient
        hand_over(values, weight)


def inputs_of(args: tuple[Any, ...]) -> Sequence[Any]:
    """Return the tensors that a backward with these arguments asks for."""
    inputs: Sequence[Any] = args[_INPUTS] if len(args) > _INPUTS else ()
    return inputs


def run_with(
    more: Iterable[torch.Tensor], run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[torch.Tensor | None] | None:
    """Run a backward that asks for ``more`` tensors too. Return the gradients; None if it accumulates them."""
    rest = args[_INPUTS + 1 :] if kwargs["accumulate_grad"] else (True,)  # allow_unused
    found: Sequence[torch.Tensor | None] = run(*args[:_INPUTS], (*args[_INPUTS], *more), *rest, **kwargs)
    return None if kwargs["accumulate_grad"] else found


def combined(
    args: tuple[Any, ...], own: Sequence[torch.Tensor | None], through: Mapping[int, torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients that a backward with ``args`` asks for: from their ``own`` edges and ``through`` others.

    ``through`` has the place of a tensor among those that are asked for.
    """
    found, allow_unused = list(own[: len(args[_INPUTS])]), args[_INPUTS + 1]
    for place, gradient in through.items():
        direct = found[place]
        if direct is None or gradient is None:
            found[place] = gradient if direct is None else direct
        else:
            found[place] = direct + gradient
    if not allow_unused and any(gradient is None for gradient in found):
        raise RuntimeError(_UNUSED)
    return tuple(found)
