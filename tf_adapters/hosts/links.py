"""Sends and receives between the ranks of a pipeline. Beginning one does not block the rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Transfer(NamedTuple):
    """A transfer in progress. It keeps its tensor, because a sent tensor must stay alive until it has arrived."""

    work: Any
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return the tensor when it has arrived. On a device only the stream waits, not the caller."""
        self.work.wait()
        return self.tensor


Message = Sequence[Transfer]
"""The result of one action, which may be several tensors."""


class Links:
    """Sends to and receives from the ranks of a process group.

    No other transfer between these ranks uses the group while a batch runs in a plan's order. Both ends begin their
    transfers in the same sequence (``schedule.messages``). They therefore match on gloo, where transfers are
    independent, and on NCCL, which runs the transfers of a pair or of the group one after the other.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = group.rank()

    def send(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Begin to send to a ``rank`` of the group."""
        tensor = tensor.detach().contiguous()  # the host may free the data of its tensor
        return Transfer(dist.isend(tensor, self._in_world(rank), group=self.group), tensor)

    def receive(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Begin to receive into ``tensor`` from a ``rank`` of the group."""
        return Transfer(dist.irecv(tensor.detach(), self._in_world(rank), group=self.group), tensor)

    def _in_world(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


class SentMessages:
    """The messages to one neighbour, in the order in which they were sent. Each is kept until it has arrived."""

    def __init__(self) -> None:
        self._kept = deque[Message]()
        self._arrived = 0

    def keep(self, message: Message) -> None:
        """Keep a message that has begun."""
        self._kept.append(message)

    def let_go(self, taken: int) -> None:
        """Drop the messages that have arrived: the first ``taken`` ones, and others whose transfers are completed.

        Raises if a transfer failed. It waits only for messages that are known to have arrived.
        """
        while self._kept and (self._arrived < taken or all(sent.work.is_completed() for sent in self._kept[0])):
            for sent in self._kept.popleft():
                sent.wait()
            self._arrived += 1

    def finish(self) -> None:
        """Wait until all messages have arrived."""
        self.let_go(self._arrived + len(self._kept))
