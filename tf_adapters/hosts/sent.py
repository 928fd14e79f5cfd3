"""Keep the tensors that a rank has sent to one neighbour until they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch


class SentMessages:
    """Messages in the order in which they were sent. Each message is the transfers of some tensors."""

    def __init__(self) -> None:
        self._kept = deque[Sequence[tuple[Any, torch.Tensor]]]()
        self._arrived = 0

    def keep(self, message: Sequence[tuple[Any, torch.Tensor]]) -> None:
        """Keep a message that has begun: torch's work and tensor of each transfer."""
        self._kept.append(message)

    def let_go(self, taken: int) -> None:
        """Drop the messages that have arrived: the first ``taken`` ones, and others whose transfers are completed.

        Raises if a transfer failed. It waits only for messages that are known to have arrived.
        """
        while self._kept and (self._arrived < taken or all(work.is_completed() for work, _ in self._kept[0])):
            for work, _ in self._kept.popleft():
                work.wait()
            self._arrived += 1

    def finish(self) -> None:
        """Wait until all messages have arrived."""
        self.let_go(self._arrived + len(self._kept))
