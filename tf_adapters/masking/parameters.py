"""Forward-time masking: a frozen parameter's weight gradient is never recorded, so it is never computed.

While a microbatch's forward runs, and again while its backward runs, its frozen parameters have
``requires_grad=False``. Autograd then builds no weight-gradient node for them and keeps no activation for it.
Turning the flag off for the backward alone would skip nothing; turning it off for the forward alone would lose
gradients under recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch


class ParameterMask:
    """Freezes parameters of one rank by name and restores exactly those it froze, whatever happens inside."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)

    @contextmanager
    def frozen(self, names: Iterable[str]) -> Iterator[None]:
        """Freeze ``names`` inside the block. Parameters that the user froze already are left alone."""
        held = [p for p in map(self._parameters.__getitem__, names) if p.requires_grad]
        for parameter in held:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in held:
                parameter.requires_grad_(True)
