"""Forward-time masking: a frozen parameter's weight gradient is never recorded, so it is never computed.

While a microbatch's forward runs, and again while its backward runs, its frozen parameters have
``requires_grad=False``. Autograd then builds no weight-gradient node for them and keeps no activation for it.
Turning the flag off for the backward alone would skip nothing; turning it off for the forward alone would lose
gradients under recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

COMPILED = (
    "the model or a part of it is compiled with torch.compile, which would recompile for every mask; "
    'compile its layers one by one and take granularity "block", or train without compiling'
)


class ParameterMask:
    """Freezes parameters of one rank by name and restores exactly those it froze, whatever happens inside."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)

    @contextmanager
    def frozen(self, names: Iterable[str]) -> Iterator[None]:
        """Freeze ``names`` inside the block. Parameters that the user froze already are left alone."""
        with without_gradients([p for p in map(self._parameters.__getitem__, names) if p.requires_grad]):
            yield


class without_gradients:  # noqa: N801 - it reads as a function, and is one that every layer calls
    """``requires_grad=False`` for some parameters inside the block."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters

    def __enter__(self) -> None:
        for parameter in self._parameters:
            parameter.requires_grad = False

    def __exit__(self, *_: object) -> None:
        for parameter in self._parameters:
            parameter.requires_grad = True


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether this module itself, not a part of it, is compiled: torch.compile guards on ``requires_grad``."""
    return vars(module).get("_compiled_call_impl") is not None or type(module).__name__ == "OptimizedModule"


def any_compiled(modules: Mapping[str, torch.nn.Module]) -> bool:
    """Return whether one of these or a part of it is compiled. A hook on it would compile it anew."""
    return any(is_compiled(part) for module in modules.values() for part in module.modules())
