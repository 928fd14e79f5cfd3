"""Messages between pipeline neighbours whose sends do not wait for their receivers.

They go over the pipeline's own group, on which nothing else is under way while a batch runs in a plan's order. Both
ends begin their transfers in one sequence (``schedule.messages``), so that they match on gloo, where each stands alone,
and on NCCL, which runs those of a pair, or of the whole group, one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Links", "Message"]


class Message(NamedTuple):
    """A transfer under way. What is sent is kept here until it has arrived."""

    work: Any
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there; on a device what follows on its stream waits, not the caller."""
        self.work.wait()
        return self.tensor


class Links:
    """This rank's way to its neighbours in a pipeline's process group."""

    def __init__(self, group: Any) -> None:
        self._group, self._rank = group, group.rank()
        self.is_first, self.is_last = self._rank == 0, self._rank == group.size() - 1

    def send(self, tensor: torch.Tensor, step: int) -> Message:
        """Begin to send to the next rank (``step`` 1) or the one before (-1)."""
        tensor = tensor.detach().contiguous()  # the host may take the data of its own tensor away
        return Message(dist.isend(tensor, self._peer(step), group=self._group), tensor)

    def receive(self, tensor: torch.Tensor, step: int) -> Message:
        """Begin to receive into ``tensor`` from the next rank (``step`` 1) or the one before (-1)."""
        return Message(dist.irecv(tensor.detach(), self._peer(step), group=self._group), tensor)

    def _peer(self, step: int) -> int:
        return dist.get_global_rank(self._group, self._rank + step)
