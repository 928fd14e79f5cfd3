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
