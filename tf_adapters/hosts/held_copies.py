"""Copies of held values, for optimizers whose step would change them."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HeldCopies:
    """Copies of values that the next step must leave as they are."""

    def __init__(self) -> None:
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Save the values of these tensors or views."""
        self._values += [(tensor.detach(), tensor.detach().clone()) for tensor in tensors]

    def put_back(self) -> None:
        """Restore the saved values, and drop them."""
        for tensor, value in self._values:
            tensor.copy_(value)  # both are detached
        self._values.clear()
