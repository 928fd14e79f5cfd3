"""Values that an optimizer's step must leave as they are: saved before it and restored after it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Kept:
    """Copies of values, and the tensors that they belong to."""

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
