"""Decisions that every rank takes together: gathered, decided on one rank, broadcast.

A rank that fails locally must not leave the others waiting in a collective, so errors travel as values and every
rank learns of them at the same point.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from tf_adapters.errors import TimelyFreezeError, UnsupportedError

T = TypeVar("T")
R = TypeVar("R")

_SHORT = 512
"""Bytes of a message up to which padding costs less than another collective."""

_TAG = 7_411
"""Of our sends, so that no receive of the host takes them, where the backend knows tags."""


class RemoteError(TimelyFreezeError, RuntimeError):
    """A rank failed; every rank raises this with the same text."""


class Collectives(Protocol):
    """What the controller needs of a process group. Every method is called on all ranks at the same point.

    Values are pickled, so floats stay float64. Equal values of several ranks may arrive as one object: do not change
    what you are given.
    """

    rank: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's value, by rank, on rank 0; None on the others."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""

    def close(self) -> None:
        """Let go of what was made for them; nothing can be sent afterwards."""


class ProcessGroupCollectives:
    """Collectives of the ranks of a torch process group (all ranks by default), over a gloo group of their own.

    Nothing of ours is then on the device, and no message waits in the queue of the host's backend or for its watchdog.
    Messages wait as long as the host's, so that ranks end as soon after one is lost. Make one on all ranks of ``group``
    at the same point.

    Ranks first compare digests: of equal values, as replicas have them, one is sent. Short values then go to all ranks
    at once, padded to the longest; each long one is sent by itself in its own length, compressed.
    """

    def __init__(self, group: Any = None) -> None:
        self.rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._group: Any = _gloo_group(group)

    def gather(self, value: Any) -> list[Any]:
        return self._exchange(value, self._broadcast_bytes)

    def collect(self, value: Any) -> list[Any] | None:
        values = self._exchange(value, self._send_to_first)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        message = _packed(value) if self.rank == 0 else b""
        first = len(message).to_bytes(8, "little") + message[:_SHORT]
        first = self._broadcast_bytes(first, length=8 + _SHORT, source=0)
        length = int.from_bytes(first[:8], "little")
        if length <= _SHORT:
            return _unpacked(first[8 : 8 + length])
        return _unpacked(self._broadcast_bytes(message, length, source=0))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the host has destroyed all groups but its own
                dist.destroy_process_group(group)

    def _exchange(self, value: Any, transfer: Callable[[bytes, int, int], bytes]) -> list[Any]:
        """``transfer(message, length, source)`` brings one long message to the ranks that need it."""
        message = _packed(value)
        header = len(message).to_bytes(8, "little") + hashlib.blake2b(message, digest_size=16).digest()
        headers = self._gather_bytes(header, len(header))
        sources: dict[bytes, int] = {}
        for rank, of_rank in enumerate(headers):
            sources.setdefault(of_rank, rank)
        lengths = {of_rank: int.from_bytes(of_rank[:8], "little") for of_rank in sources}
        messages = {header: message}
        if len(sources) > 1:
            width = max((length for length in lengths.values() if length <= _SHORT), default=0)
            short = self._gather_bytes(message if len(message) <= width else b"", width) if width else []
            for of_rank, source in sources.items():
                length = lengths[of_rank]
                messages[of_rank] = short[source][:length] if length <= _SHORT else transfer(message, length, source)
        values = {of_rank: _unpacked(content) for of_rank, content in messages.items() if content}
        return [values.get(of_rank) for of_rank in headers]

    def _gather_bytes(self, content: bytes, width: int) -> list[bytes]:
        """Every rank's content, padded to ``width`` bytes."""
        received = torch.empty(self._size, width, dtype=torch.uint8)
        dist.all_gather(list(received.unbind()), self._tensor(content, width), group=self._group)
        data = received.numpy().tobytes()
        return [data[start : start + width] for start in range(0, len(data), width)]

    def _broadcast_bytes(self, content: bytes, length: int, source: int) -> bytes:
        """``length`` bytes of rank ``source``, on all ranks."""
        tensor = self._tensor(content if self.rank == source else b"", length)
        dist.broadcast(tensor, src=self._global(source), group=self._group)
        return tensor.numpy().tobytes()

    def _send_to_first(self, content: bytes, length: int, source: int) -> bytes:
        """``length`` bytes of rank ``source``, on rank 0; nothing on the others."""
        if source == 0 or self.rank not in (0, source):
            return content if self.rank == source else b""
        tensor = self._tensor(content if self.rank == source else b"", length)
        if self.rank == source:
            dist.send(tensor, dst=self._global(0), group=self._group, tag=_TAG)
            return b""
        dist.recv(tensor, src=self._global(source), group=self._group, tag=_TAG)
        return tensor.numpy().tobytes()

    def _tensor(self, content: bytes, width: int) -> torch.Tensor:
        padded = bytearray(content.ljust(width, b"\0"))
        return torch.frombuffer(padded, dtype=torch.uint8)

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


def _gloo_group(group: Any) -> Any:
    """A gloo group of the ranks of ``group``, which need no other rank for it."""
    ranks = None if group is None else dist.get_process_group_ranks(group)
    try:
        return dist.new_group(
            ranks, timeout=_timeout(group), backend="gloo", use_local_synchronization=ranks is not None
        )
    except (RuntimeError, ValueError) as error:
        raise UnsupportedError(
            "timely_freeze cannot run here: the ranks cannot reach each other over gloo, which our messages need; "
            f"GLOO_SOCKET_IFNAME names the network interface ({' '.join(str(error).split())})"
        ) from error


def _timeout(group: Any) -> timedelta | None:
    """How long the messages of ``group`` (all ranks by default) wait; None, torch's default, where it does not say."""
    group = group or dist.group.WORLD
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    return max((limit for of in options if (limit := getattr(of, "_timeout", None)) is not None), default=None)


def holds_first_rank(group: Any = None) -> bool:
    """Whether rank 0 of the job is in ``group`` (all ranks by default), one of groups that no two share a rank."""
    return 0 in dist.get_process_group_ranks(group)


class SingleProcess:
    """The trivial group of one rank."""

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def collect(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        """Nothing was made."""


def on_all_ranks(collectives: Collectives, function: Callable[[], T]) -> list[T]:
    """Run ``function`` on every rank and return every rank's value; if it fails on any, raise the same on all."""
    return _values(collectives.gather(_attempt(function)))


def decide_from_all(collectives: Collectives, local: Callable[[], T], decide: Callable[[list[T]], R]) -> R:
    """Run ``local`` on every rank and ``decide`` with all their values on rank 0; return what it decides on every rank.

    If anything fails, raise the same error on all. Costs less than ``on_all_ranks``: values travel to one rank only.
    """
    outcomes = collectives.collect(_attempt(local))
    decided = None if outcomes is None else _attempt(lambda: decide(_values(outcomes)))
    return _value_of(collectives.broadcast(decided))  # type: ignore[no-any-return]


def to_first_rank(collectives: Collectives, local: Callable[[], T]) -> list[T] | None:
    """Run ``local`` on every rank; all their values on rank 0, None on the others, which wait for nothing more.

    If it fails on any rank, raise on rank 0 alone.
    """
    outcomes = collectives.collect(_attempt(local))
    return None if outcomes is None else _values(outcomes)


def on_one_rank(collectives: Collectives, function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 and broadcast its value, or raise the same error on every rank."""
    return _value_of(collectives.broadcast(_attempt(function) if collectives.rank == 0 else None))  # type: ignore[no-any-return]


_Failure = tuple[type[TimelyFreezeError], str]
_Outcome = tuple[Any, _Failure | None]


def _attempt(function: Callable[[], T]) -> tuple[T | None, _Failure | None]:
    """The function's value, or what it failed with as plain data: never an exception."""
    try:
        return function(), None
    except TimelyFreezeError as error:
        return None, (type(error), str(error))
    except Exception as error:
        return None, (RemoteError, f"{type(error).__name__}: {error}")


def _value_of(outcome: _Outcome) -> Any:
    value, failure = outcome
    if failure is not None:
        kind, text = failure
        raise kind(text)
    return value


def _values(outcomes: list[_Outcome]) -> list[Any]:
    """The values of all ranks, or one error for what failed on some."""
    failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
    if failures:
        raise _together(failures, len(outcomes))
    return [value for value, _ in outcomes]


def _together(failures: dict[int, _Failure], size: int) -> TimelyFreezeError:
    """One error for what failed on some ranks: the common text if all say the same, else each rank's own."""
    if len(failures) == size and len(set(failures.values())) == 1:
        kind, text = failures[next(iter(failures))]
        return kind(text)
    kinds = {kind for kind, _ in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else RemoteError
    return kind("; ".join(f"rank {rank}: {text}" for rank, (_, text) in failures.items()))


def _packed(value: Any) -> bytes:
    """The pickled value; compressed, where it is long. The first byte says which."""
    data = pickle.dumps(value)
    return b"p" + data if len(data) < _SHORT else b"z" + zlib.compress(data, 1)


def _unpacked(message: bytes) -> Any:
    data = message[1:]
    return pickle.loads(data if message[:1] == b"p" else zlib.decompress(data))
