"""Transfers of torch.distributed.pipelining through host memory: gloo sends no tensors of a GPU.

For two processes that share one GPU, which NCCL refuses. Source: torch/distributed/pipelining/schedules.py
(``_batch_p2p``), stage.py (``_warmup_forward_vote``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from tf_adapters.overrides import Overrides


class Received:
    """A receive into host memory that ends in the tensor it is for."""

    def __init__(self, tensor: torch.Tensor, work: Any, buffer: torch.Tensor) -> None:
        self._tensor, self._work, self._buffer = tensor, work, buffer

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._buffer)


class Sent:
    """A send out of host memory, which must stay until it is done."""

    def __init__(self, work: Any, buffer: torch.Tensor) -> None:
        self._work, self._buffer = work, buffer

    def wait(self) -> None:
        self._work.wait()


def transfer(operation: Any) -> Received | Sent:
    """Start one ``dist.P2POp``."""
    tensor = operation.tensor.detach()
    if operation.op is dist.isend:
        buffer = in_host_memory(tensor, copied=True)
        return Sent(dist.isend(buffer, operation.peer, group=operation.group, tag=operation.tag), buffer)
    buffer = in_host_memory(tensor, copied=False)
    return Received(tensor, dist.irecv(buffer, operation.peer, group=operation.group, tag=operation.tag), buffer)


def in_host_memory(tensor: torch.Tensor, copied: bool) -> torch.Tensor:
    """A tensor of the same shape and type, with the same values if ``copied``."""
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return buffer.copy_(tensor) if copied else buffer


def batch(operations: Sequence[Any], desc: str | None = None) -> list[Any]:
    """In the place of ``_batch_p2p``."""
    return [transfer(operation) for operation in operations]


def _sending(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: run(in_host_memory(tensor, copied=True), *args, **kwargs)


def _receiving(run: Callable[..., Any]) -> Callable[..., Any]:
    def receive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        buffer = in_host_memory(tensor, copied=False)
        source = run(buffer, *args, **kwargs)
        tensor.copy_(buffer)
        return source

    return receive


@contextmanager
def through_host_memory() -> Iterator[None]:
    """Inside the block, schedules of this process transfer through host memory."""
    overrides = Overrides()
    overrides.set(schedules, "_batch_p2p", batch)
    overrides.set(dist, "send", _sending(dist.send))
    overrides.set(dist, "recv", _receiving(dist.recv))
    try:
        yield
    finally:
        overrides.restore()
