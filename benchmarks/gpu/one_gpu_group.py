"""A torch process group for ranks that share one GPU, which NCCL refuses.

gloo does the collectives. It has no send and receive for CUDA tensors, so those go through *mailboxes*: for each pair
of ranks a ring of slots in the sender's memory, which the receiver opens over CUDA IPC. On a CPU the slots are in
shared memory, and all else is the same code.

A rank's stream never waits for another rank's process, only for an event. A rank's process waits until the other
process has queued its copy. So processes run ahead of the GPU, as they do with NCCL.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.multiprocessing.reductions import reduce_tensor

BACKEND = "one_gpu"
SLOTS = 32
"""Messages from one rank to another that may be in flight at once: more than a step sends."""
WAIT_S = 120.0
SPINS = 100


class NoEvent:
    """Stands for a CUDA event on a CPU, where a copy has ended when it returns."""

    def record(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""


class Mailbox:
    """The slots from one rank to another, and two counters for each slot: messages posted and taken.

    Message ``n`` uses slot ``n % SLOTS``. Its sender waits until the slot's earlier message was taken.
    """

    def __init__(self, folder: Path, source: int, target: int, slot_bytes: int) -> None:
        self.name, self._folder, self._bytes = f"{source}-{target}", folder, slot_bytes
        self._to_itself = source == target  # torch 2.11 sends once from a rank to itself in a V
        self._sent = self._received = 0
        self._slots: Any = None  # opened at the first message
        self._ready: list[Any] = []  # events of the sender, by slot: the message is in it
        self._taken: list[Any] = []  # events of the receiver: the slot is free
        counters = np.memmap(folder / f"{self.name}.counters", np.int64, "r+", shape=(2, SLOTS))
        self._posted_count, self._taken_count = counters

    def send(self, tensor: torch.Tensor, store: Any) -> Work:
        """Queue the copy into a slot."""
        number, slot = self._sent, self._sent % SLOTS
        self._sent += 1
        if self._slots is None:
            self._open_as_sender(tensor.device, store)
        if number >= SLOTS:
            wait_until(lambda: self._taken_count[slot] == number - SLOTS + 1, f"{self.name} to take message {number}")
            self._taken = self._taken or opened_events(store.get(f"{self.name}/taken"), tensor.device)
            self._taken[slot].wait()
        self._view(slot, tensor).copy_(tensor)
        self._ready[slot].record()
        self._posted_count[slot] = number + 1
        return Done()

    def receive(self, tensor: torch.Tensor, store: Any) -> Work:
        """Return a work object. Its ``wait`` queues the copy out of the slot."""
        number, slot = self._received, self._received % SLOTS
        self._received += 1

        def take() -> None:
            wait_until(lambda: self._posted_count[slot] == number + 1, f"{self.name} to post message {number}")
            if self._slots is None:
                self._open_as_receiver(tensor.device, store)
            self._ready[slot].wait()
            tensor.copy_(self._view(slot, tensor))
            self._taken[slot].record()
            self._taken_count[slot] = number + 1

        return Receive(take)

    def _view(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        if size > self._bytes:
            raise ValueError(f"a message of {size} bytes is larger than a slot of {self._bytes}")
        begin = slot * self._bytes
        return self._slots[begin : begin + size].view(tensor.dtype).view(tensor.shape)

    def _open_as_sender(self, device: torch.device, store: Any) -> None:
        if device.type == "cpu":
            self._slots, self._ready = self._shared_slots(), no_events()
            self._taken = no_events()
            return
        self._slots = torch.empty(SLOTS * self._bytes, dtype=torch.uint8, device=device)
        store.set(f"{self.name}/slots", pickle.dumps(reduce_tensor(self._slots)))
        self._ready = new_events(f"{self.name}/ready", store)
        if self._to_itself:
            self._taken = [torch.cuda.Event() for _ in range(SLOTS)]

    def _open_as_receiver(self, device: torch.device, store: Any) -> None:
        if device.type == "cpu":
            self._slots, self._ready = self._shared_slots(), no_events()
            self._taken = no_events()
            return
        rebuild, arguments = pickle.loads(store.get(f"{self.name}/slots"))
        self._slots = rebuild(*arguments)
        self._ready = opened_events(store.get(f"{self.name}/ready"), device)
        self._taken = new_events(f"{self.name}/taken", store)

    def _shared_slots(self) -> torch.Tensor:
        path = str(self._folder / f"{self.name}.slots")
        return torch.from_file(path, shared=True, size=SLOTS * self._bytes, dtype=torch.uint8)


class Done(Work):
    """A send. It needs no wait, because its tensor is copied in the stream that made it."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Receive(Work):
    """A receive that is queued at its first ``wait``."""

    def __init__(self, take: Callable[[], None]) -> None:
        super().__init__()
        self._take: Callable[[], None] | None = take

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._take is not None:
            take, self._take = self._take, None
            take()
        return True

    def is_completed(self) -> bool:
        return self._take is None


class OneGpuGroup(dist.ProcessGroup):
    """gloo with sends and receives of our own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, dist.PrefixStore("mailboxes", store)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._to: dict[int, Mailbox] = {}
        self._from: dict[int, Mailbox] = {}

    def open(self, folder: Path, slot_bytes: int) -> None:
        """Make the mailboxes, whose files are in ``folder``. Called on all ranks at once."""
        for other in range(self._size):
            np.zeros((2, SLOTS), np.int64).tofile(folder / f"{self._rank}-{other}.counters")
        self._gloo.barrier().wait()
        for other in range(self._size):
            self._to[other] = Mailbox(folder, self._rank, other, slot_bytes)
            self._from[other] = self._to[other]
            if other != self._rank:
                self._from[other] = Mailbox(folder, other, self._rank, slot_bytes)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - as torch spells it
        return BACKEND

    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> Work:
        return self._to[target].send(tensors[0].detach(), self._store)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Work:
        return self._from[source].receive(tensors[0].detach(), self._store)

    def allreduce(self, *args: Any, **kwargs: Any) -> Work:
        return self._gloo.allreduce(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        return self._gloo.broadcast(*args, **kwargs)

    def allgather(self, *args: Any, **kwargs: Any) -> Work:
        return self._gloo.allgather(*args, **kwargs)

    def _allgather_base(self, *args: Any, **kwargs: Any) -> Work:
        return self._gloo._allgather_base(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        return self._gloo.barrier(*args, **kwargs)


def join_one_gpu() -> None:
    """Initialize torch.distributed with this group. Called on all ranks at once."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, OneGpuGroup, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND)


def wait_until(reached: Callable[[], Any], waited_for: str) -> None:
    """Poll a counter of another process. Raises TimeoutError after two minutes."""
    deadline = time.monotonic() + WAIT_S
    polls = 0
    while not reached():
        polls += 1
        if polls > SPINS:
            time.sleep(20e-6)
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_S:g} s for rank {waited_for}")


def no_events() -> list[Any]:
    return [NoEvent()] * SLOTS


def new_events(name: str, store: Any) -> list[Any]:
    """Make events that another process can wait for, and publish them."""
    events = [torch.cuda.Event(interprocess=True) for _ in range(SLOTS)]
    store.set(name, pickle.dumps([event.ipc_handle() for event in events]))
    return events


def opened_events(handles: bytes, device: torch.device) -> list[Any]:
    return [torch.cuda.Event.from_ipc_handle(device, handle) for handle in pickle.loads(handles)]
