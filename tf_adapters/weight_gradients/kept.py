"""Values that an optimizer's step must leave as they are: kept before it and put back after it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Kept:
    """Values as they were when they were kept."""

    def __init__(self) -> None:
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember the values of these tensors or views."""
        self._values += [(tensor.detach(), tensor.detach().clone()) for tensor in tensors]

    def put_back(self) -> None:
        """Give all that was kept its values back, and forget them."""
        for tensor, value in self._values:
            tensor.copy_(value)  # both are detached
        self._values.clear()
