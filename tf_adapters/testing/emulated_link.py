"""Emulate links between ranks: a message can be used no earlier than with a link of the given speed.

Every message carries its emulated time of arrival. It leaves when the link is free, takes bytes / rate to leave, and
the latency to arrive. The receiver waits until that time, and until the message has really arrived. The sender does not
wait. Computation during the transfer hides it, as on a real link.

It covers ``torch.distributed.isend``, ``irecv``, ``send``, ``recv`` and ``batch_isend_irecv``, which all hosts'
pipelines use, for tensors on the CPU (gloo) and ranks of one machine, which share a clock. Collectives are not
emulated.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tf_adapters.errors import ConfigError
from tf_adapters.measuring.timer import CLOCKS, Clock

__all__ = ["EmulatedClock", "EmulatedLinks", "Link"]

_HEADER = 16
"""Bytes of the header: time of sending and of arrival. 16 bytes keep data of any type aligned."""


class EmulatedClock(Clock):
    """This machine's clock, while operations or messages last as long as on a device that is not there."""

    device = "emulated"


@dataclass(frozen=True)
class Link:
    """One way between two ranks: ``latency_ms`` from 0, ``bytes_per_s`` above 0. Raises ConfigError."""

    latency_ms: float = 0.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_ms) and self.latency_ms >= 0.0):
            raise ConfigError(f"latency_ms is {self.latency_ms}: allowed is a number of ms from 0")
        if not self.bytes_per_s > 0.0:
            raise ConfigError(f"bytes_per_s is {self.bytes_per_s}: allowed is a number above 0")


class EmulatedLinks:
    """Emulates the links between ranks of this process group while it is active.

    It must be active on both ends of a link, with the same arguments, from before the first message to after the last.

    Args:
        default: the link between any two ranks without an edge; None: such links are not emulated.
        edges: links by pairs of global ranks, for both directions; each direction has the whole rate.
        clock, sleep: functions for time and waiting, in seconds. All ranks must share the clock.

    Attributes:
        messages, message_bytes: number and bytes of received messages.
        asked_s: their emulated transfer times, summed.
        late_s: their delay beyond that while the receiver waited: gloo was slower than the link.
    """

    def __init__(
        self,
        default: Link | None = None,
        edges: Mapping[tuple[int, int], Link] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._default = default
        self._edges = {frozenset(edge): link for edge, link in (edges or {}).items()}
        self._clock, self._sleep = clock, sleep
        self._free_at: dict[int, float] = {}  # by receiver: when the last message has left
        self._lock = threading.Lock()
        self._active = ExitStack()
        self.messages = self.message_bytes = 0
        self.asked_s = self.late_s = 0.0

    def __enter__(self) -> EmulatedLinks:
        self._active.enter_context(patch.dict(CLOCKS, cpu=EmulatedClock))
        self._host = {name: getattr(c10d, name) for name in ("isend", "irecv", "send", "recv")}
        self._signatures = {name: inspect.signature(function) for name, function in self._host.items()}
        ours = {"isend": self._isend, "irecv": self._irecv, "send": self._send, "recv": self._recv}
        for module in (c10d, dist):
            for name, function in ours.items():
                self._active.callback(_put_back, module, name, ours=function, before=getattr(module, name))
                setattr(module, name, function)
        return self

    def __exit__(self, *_: object) -> None:
        self._active.close()

    def between(self, rank: int, peer: int) -> Link | None:
        """Return the link of two global ranks if it is emulated."""
        return self._edges.get(frozenset((rank, peer)), self._default)

    def arrival(self, peer: int, link: Link, size: int) -> tuple[float, float]:
        """Return the current time and the arrival time, in seconds, of a message of ``size`` bytes to ``peer``."""
        with self._lock:
            now = self._clock()
            left = max(now, self._free_at.get(peer, now)) + size / link.bytes_per_s
            self._free_at[peer] = left
        return now, left + link.latency_ms / 1e3

    def await_arrival(self, sent_at: float, arrives_at: float, waiting_since: float, size: int) -> None:
        """Wait until a received message has arrived by the emulated link."""
        if (left := arrives_at - self._clock()) > 0.0:
            self._sleep(left)
        with self._lock:
            self.messages += 1
            self.message_bytes += size
            self.asked_s += arrives_at - sent_at
            self.late_s += max(0.0, self._clock() - max(arrives_at, waiting_since))

    def summary(self) -> str:
        """Return one line on the received messages and the accuracy of the emulation."""
        if not self.messages:
            return "emulated links: no message received"
        asked, late = (1e3 * seconds / self.messages for seconds in (self.asked_s, self.late_s))
        return (
            f"emulated links: {self.messages:,} messages received, {self.message_bytes:,} bytes, "
            f"{asked:.3f} ms under way on average and {late:.3f} ms late"
        )

    def _isend(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signatures["isend"].bind(*args, **kwargs)
        peer, link = self._link_of(call.arguments, "dst")
        if link is not None:
            data = call.arguments["tensor"].detach().contiguous().reshape(-1).view(torch.uint8)
            times = torch.tensor(self.arrival(peer, link, data.numel()), dtype=torch.float64)
            call.arguments["tensor"] = torch.cat([times.view(torch.uint8), data])
        return self._host["isend"](*call.args, **call.kwargs)

    def _irecv(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signatures["irecv"].bind(*args, **kwargs)
        _, link = self._link_of(call.arguments, "src")
        if link is None:
            return self._host["irecv"](*args, **kwargs)
        tensor = call.arguments["tensor"]
        message = torch.empty(_HEADER + tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        call.arguments["tensor"] = message
        work = self._host["irecv"](*call.args, **call.kwargs)
        return None if work is None else _Arriving(self, work, message, tensor)

    def _send(self, *args: Any, **kwargs: Any) -> None:
        if (work := self._isend(*args, **kwargs)) is not None:
            work.wait()

    def _recv(self, *args: Any, **kwargs: Any) -> int:
        peer, _ = self._link_of(self._signatures["recv"].bind(*args, **kwargs).arguments, "src")
        if (work := self._irecv(*args, **kwargs)) is None:
            return -1
        work.wait()
        return peer

    def _link_of(self, arguments: Mapping[str, Any], end: str) -> tuple[int, Link | None]:
        """Return the other rank of a call and the emulated link to it, or None. Raises ConfigError."""
        peer, group = arguments.get(end), arguments.get("group")
        if peer is None and (in_group := arguments.get(f"group_{end}")) is not None:
            peer = dist.get_global_rank(group or c10d._get_default_group(), in_group)
        if peer is None:
            raise ConfigError("a receive names no source: allowed over emulated links are receives from a named rank")
        link = self.between(dist.get_rank(), peer)
        device = arguments["tensor"].device
        if link is not None and device.type != "cpu":
            raise ConfigError(f"a message is on {device}: allowed over emulated links are tensors on the CPU")
        return peer, link


class _Arriving:
    """The work object of a receive over an emulated link: it waits for the host's work and for the link."""

    def __init__(self, links: EmulatedLinks, work: Any, message: torch.Tensor, tensor: torch.Tensor) -> None:
        self._links, self._work, self._tensor = links, work, tensor
        self._message: torch.Tensor | None = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait until the tensor is filled. A second call returns at once."""
        message, self._message = self._message, None
        if message is not None:
            waiting_since = self._links._clock()
            self._work.wait(*args, **kwargs)
            sent_at, arrives_at = message[:_HEADER].view(torch.float64).tolist()
            data = message[_HEADER:]
            self._links.await_arrival(sent_at, arrives_at, waiting_since, data.numel())
            target = self._tensor.detach()
            with torch.no_grad():
                target.copy_(data.view(target.dtype).view(target.shape))
        return True


def _put_back(module: Any, name: str, ours: Any, before: Any) -> None:
    """Restore a function, unless other code has replaced ours since: that code still calls ours."""
    if getattr(module, name) is ours:
        setattr(module, name, before)
