"""Messages between pipeline neighbours whose sends do not wait for their receivers.

Why no order of a plan can hang. A link has one direction and one kind of message, and both of its ends take the
messages in the order of the microbatches, so every send meets its own receive. A receive is posted before its action,
at a point that waits for nothing but earlier actions of its rank; a send is posted right after its action, and nobody
waits for it before the receiver has shown that it arrived, or the batch is over. So a message waits for nothing but
its source, what its receiver runs before its target, and the messages of the link before it: all of them earlier in
any order of time in which the plan's graph can run, and a validated plan has one.

On gloo every send and receive stands alone, so the links share the pipeline's own group. A device's backend queues
all of a group's transfers on one stream. Two neighbours that both send first would then wait for one another for ever,
and a rank's sends would wait behind its receives. So there are four groups: for activations and for gradients, each for
the links that begin at an even rank and at an odd one. Every rank uses each of them for one link at most. Communicators
are made in the first transfer, where both ends wait; ``connect`` makes that one, group by group.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Link", "Links", "Message", "connect", "needs_own_groups"]


class Message(NamedTuple):
    """A transfer under way. What is sent is kept here until it has arrived."""

    work: Any
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there; on a device what follows on its stream waits, not the caller."""
        self.work.wait()
        return self.tensor


class Link:
    """One way between two neighbours, of which this rank is one; ``peer`` is the other's global rank."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group, self._peer = group, peer

    def send(self, tensor: torch.Tensor) -> Message:
        tensor = tensor.detach().contiguous()
        return Message(dist.isend(tensor, self._peer, group=self._group), tensor)

    def receive(self, tensor: torch.Tensor) -> Message:
        """Begin to receive into ``tensor``."""
        return Message(dist.irecv(tensor.detach(), self._peer, group=self._group), tensor)


@dataclass(frozen=True)
class Links:
    """The links of one rank; None where it has no such neighbour.

    Attributes:
        inputs: activations from the rank before.
        outputs: activations to the next rank.
        output_grads: gradients from the next rank.
        input_grads: gradients to the rank before.
        early: whether a receive is best posted while another action runs: gloo moves nothing before, and a device
            would spin meanwhile.
        groups: those that were made for the links.
    """

    inputs: Link | None
    outputs: Link | None
    output_grads: Link | None
    input_grads: Link | None
    early: bool
    groups: tuple[Any, ...] = ()

    def close(self) -> None:
        """Let go of the groups that were made."""
        for group in self.groups if dist.is_initialized() else ():
            with contextlib.suppress(ValueError):  # the host has destroyed all groups but its own
                dist.destroy_process_group(group)


def needs_own_groups(pp_group: Any) -> bool:
    """Whether the pipeline's own group would make its transfers wait for one another."""
    return str(dist.get_backend(pp_group)) != dist.Backend.GLOO


def connect(pp_group: Any, device: torch.device, own_groups: bool) -> Links:
    """This rank's links in its pipeline. Called on all of its ranks at once; with ``own_groups`` on all of the job."""
    rank, size = pp_group.rank(), pp_group.size()
    groups = _groups(pp_group, device) if own_groups else (pp_group,) * 4

    def link(backwards: bool, first: int) -> Link | None:
        """The link between pipeline ranks ``first`` and ``first + 1``."""
        if not 0 <= first < size - 1:
            return None
        peer = first + 1 if rank == first else first
        return Link(groups[2 * backwards + first % 2], dist.get_global_rank(pp_group, peer))

    links = Links(
        inputs=link(False, rank - 1),
        outputs=link(False, rank),
        output_grads=link(True, rank),
        input_grads=link(True, rank - 1),
        early=not own_groups,
        groups=groups if own_groups else (),
    )
    if own_groups:
        _meet(links, rank, device)
    return links


def _groups(pp_group: Any, device: torch.device) -> tuple[Any, ...]:
    """Four groups of all ranks: communicators come into being only between ranks that use them."""
    timeout = pp_group._get_backend(device).options._timeout  # torch 2.5 to 2.13 have no other way to ask
    return tuple(dist.new_group(timeout=timeout) for _ in range(4))


def _meet(links: Links, rank: int, device: torch.device) -> None:
    """One element over every link. In each group a rank has one link, and both ends come to it in the same order."""
    element = torch.zeros(1, device=device)
    for ahead, behind, ahead_sends in (
        (links.outputs, links.inputs, True),
        (links.output_grads, links.input_grads, False),
    ):
        for parity in range(2):
            starts = rank % 2 == parity
            link = ahead if starts else behind
            if link is not None:
                (link.send if starts == ahead_sends else link.receive)(element.clone()).wait()
