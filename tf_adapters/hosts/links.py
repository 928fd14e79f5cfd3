"""Sends and receives between the ranks of a pipeline. Beginning one does not block the rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Message(NamedTuple):
    """A transfer in progress. It keeps its tensor, because a sent tensor must stay alive until it has arrived."""

    work: Any
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return the tensor when it has arrived. On a device only the stream waits, not the caller."""
        self.work.wait()
        return self.tensor


class Links:
    """Sends to and receives from the ranks of a pipeline's process group.

    No other transfer uses the group while a batch runs in a plan's order. Both ends begin their transfers in the same
    sequence (``schedule.messages``). They therefore match on gloo, where transfers are independent, and on NCCL, which
    runs the transfers of a pair or of the group one after the other.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = group.rank()

    def send(self, tensor: torch.Tensor, rank: int) -> Message:
        """Begin to send to a ``rank`` of the group."""
        tensor = tensor.detach().contiguous()  # the host may free the data of its tensor
        return Message(dist.isend(tensor, self._in_world(rank), group=self.group), tensor)

    def receive(self, tensor: torch.Tensor, rank: int) -> Message:
        """Begin to receive into ``tensor`` from a ``rank`` of the group."""
        return Message(dist.irecv(tensor.detach(), self._in_world(rank), group=self.group), tensor)

    def _in_world(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)
