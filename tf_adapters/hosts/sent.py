"""What a rank has sent to one neighbour, kept until it has arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["SentMessages"]


class SentMessages:
    """Messages in the order in which they were sent; each is the transfers of some tensors."""

    def __init__(self) -> None:
        self._kept = deque[Sequence[tuple[Any, torch.Tensor]]]()
        self._arrived = 0

    def keep(self, message: Sequence[tuple[Any, torch.Tensor]]) -> None:
        """A message has begun: torch's work and tensor of each of its transfers."""
        self._kept.append(message)

    def let_go(self, taken: int) -> None:
        """Keep no message that has arrived: the first ``taken`` ones have, others where the device says so.

        What failed raises. Only a message that is known to have arrived is waited for.
        """
        while self._kept and (self._arrived < taken or all(work.is_completed() for work, _ in self._kept[0])):
            for work, _ in self._kept.popleft():
                work.wait()
            self._arrived += 1

    def finish(self) -> None:
        """Wait until everything has arrived."""
        self.let_go(self._arrived + len(self._kept))
