"""Decisions of all ranks together: values are gathered, one rank decides, the decision is broadcast.

A rank that fails must not leave other ranks waiting in a collective. Errors therefore travel as values, and every rank
learns of them at the same point.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tf_adapters.errors import TimelyFreezeError
from tf_adapters.gloo import gloo_group

T = TypeVar("T")
R = TypeVar("R")

_SHORT = 512
"""For messages up to this size, in bytes, padding costs less than another collective."""

_TAG = 7_411  # of our sends


class RemoteError(TimelyFreezeError, RuntimeError):
    """A rank failed; every rank raises this with the same text."""


class Collectives:
    """The messages between the ranks that train together. This class serves a run of one rank.

    Every method is called on all ranks at the same point. Values are pickled, so floats stay float64. Equal values of
    several ranks may arrive as one object: do not change received values.
    """

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, on every rank."""
        return [value]

    def collect(self, value: Any) -> list[Any] | None:
        """Return every rank's value, by rank, on rank 0; None on other ranks."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return value

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's entry of rank 0's ``values``, one per rank. Other ranks pass None."""
        return None if values is None else values[0]

    def close(self) -> None:
        """Free the process group, if there is one. No method may be called afterwards."""


class ProcessGroupCollectives(Collectives):
    """Collectives of the ranks of a torch process group (all ranks by default), over a separate gloo group.

    With gloo, our messages use no device memory and do not enter the queue or the watchdog of the host's backend. Their
    timeout is the host's, so ranks end as soon as the host's would after a rank is lost. Create it on all ranks of
    ``group`` at the same point.

    Ranks first compare digests, so that equal values, which replicas have, are sent once. ``gather`` sends short values
    in one collective, padded to the longest, and broadcasts each long value separately, compressed. ``collect`` sends
    values to rank 0 only: the traffic of other ranks does not grow with the number of ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self.rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._group: Any = gloo_group(group)

    def gather(self, value: Any) -> list[Any]:
        message = _packed(value)
        header = _header(message)
        headers = self._gather_bytes(header, len(header))
        sources = _first_of_each(headers)
        messages = {header: message}
        if len(sources) > 1:
            width = max((length for of_rank in sources if (length := _length(of_rank)) <= _SHORT), default=0)
            short = self._gather_bytes(message if len(message) <= width else b"", width) if width else []
            for of_rank, source in sources.items():
                length = _length(of_rank)
                if length <= _SHORT:
                    messages[of_rank] = short[source][:length]
                else:
                    messages[of_rank] = self._broadcast_bytes(message, length, source)
        values = {of_rank: _unpacked(content) for of_rank, content in messages.items()}
        return [values[of_rank] for of_rank in headers]

    def collect(self, value: Any) -> list[Any] | None:
        message = _packed(value)
        headers = self._headers_at_first(_header(message))
        sources = _first_of_each(headers)
        asked = [sources[header] == rank for rank, header in enumerate(headers)]
        is_asked = self._scatter_bytes([bytes([ask]) for ask in asked], 1) == b"\1"
        if self.rank:
            if is_asked:
                tensor = self._tensor(message, len(message))
                self._group.send([tensor], 0, _TAG).wait()
            return None
        messages = self._receive({source: _length(header) for header, source in sources.items() if source})
        values = {source: _unpacked(content) for source, content in {0: message, **messages}.items()}
        return [values[sources[header]] for header in headers]

    def broadcast(self, value: Any) -> Any:
        message = _packed(value) if self.rank == 0 else b""
        first = len(message).to_bytes(8, "little") + message[:_SHORT]
        first = self._broadcast_bytes(first, length=8 + _SHORT, source=0)
        length = int.from_bytes(first[:8], "little")
        if length <= _SHORT:
            return _unpacked(first[8 : 8 + length])
        return _unpacked(self._broadcast_bytes(message, length, source=0))

    def scatter(self, values: Sequence[Any] | None) -> Any:
        messages = [_packed(value) for value in values or ()]
        width = max(map(len, messages), default=0)
        sizes = [len(message).to_bytes(8, "little") + width.to_bytes(8, "little") for message in messages]
        mine = self._scatter_bytes(sizes, 16)
        length, width = (int.from_bytes(half, "little") for half in (mine[:8], mine[8:]))
        return _unpacked(self._scatter_bytes(messages, width)[:length])

    def close(self) -> None:
        self._group = None

    def _gather_bytes(self, content: bytes, width: int) -> list[bytes]:
        """Gather every rank's content, padded to ``width`` bytes."""
        received = torch.empty(self._size, width, dtype=torch.uint8)
        self._group.allgather(list(received.unbind()), self._tensor(content, width)).wait()
        data = received.numpy().tobytes()
        return [data[start : start + width] for start in range(0, len(data), width)]

    def _broadcast_bytes(self, content: bytes, length: int, source: int) -> bytes:
        """Broadcast ``length`` bytes of rank ``source``."""
        tensor = self._tensor(content if self.rank == source else b"", length)
        self._group.broadcast(tensor, source).wait()
        return tensor.numpy().tobytes()

    def _headers_at_first(self, header: bytes) -> list[bytes]:
        """Gather every rank's header on rank 0; return an empty list on other ranks."""
        received = torch.empty(self._size if self.rank == 0 else 0, len(header), dtype=torch.uint8)
        self._group.gather(list(received.unbind()), self._tensor(header, len(header)), 0).wait()
        return [row.tobytes() for row in received.numpy()]

    def _scatter_bytes(self, contents: Sequence[bytes], width: int) -> bytes:
        """Return this rank's entry of rank 0's contents, padded to ``width`` bytes."""
        received = torch.empty(width, dtype=torch.uint8)
        parts = [self._tensor(content, width) for content in contents] if self.rank == 0 else []
        self._group.scatter(received, parts, 0).wait()
        return received.numpy().tobytes()

    def _receive(self, lengths: Mapping[int, int]) -> dict[int, bytes]:
        """Receive on rank 0 a message of given length, in bytes, from each of some ranks."""
        received = {source: torch.empty(length, dtype=torch.uint8) for source, length in lengths.items()}
        works = [self._group.recv([tensor], source, _TAG) for source, tensor in received.items()]
        for work in works:
            work.wait()
        return {source: tensor.numpy().tobytes() for source, tensor in received.items()}

    def _tensor(self, content: bytes, width: int) -> torch.Tensor:
        padded = bytearray(content.ljust(width, b"\0"))
        return torch.frombuffer(padded, dtype=torch.uint8)


def holds_first_rank(group: Any = None) -> bool:
    """Return whether rank 0 of the job is in ``group`` (all ranks by default). Groups must be disjoint."""
    return 0 in dist.get_process_group_ranks(group)


def on_all_ranks(collectives: Collectives, function: Callable[[], T]) -> list[T]:
    """Run ``function`` on every rank and return every rank's value. If a rank fails, raise the same error on all."""
    return _values(collectives.gather(_attempt(function)))


def decide_from_all(collectives: Collectives, local: Callable[[], T], decide: Callable[[list[T]], R]) -> R:
    """Run ``local`` on every rank and ``decide`` with all values on rank 0; return the decision on every rank.

    If one of them fails, raise the same error on all ranks. It costs less than ``on_all_ranks``, since values travel to
    one rank only.
    """
    outcomes = collectives.collect(_attempt(local))
    decided = None if outcomes is None else _attempt(lambda: decide(_values(outcomes)))
    return _value_of(collectives.broadcast(decided))  # type: ignore[no-any-return]


def share_from_all(collectives: Collectives, local: Callable[[], T], decide: Callable[[list[T]], Sequence[R]]) -> R:
    """As ``decide_from_all``, but ``decide`` returns one value per rank, and each rank receives only its value."""
    outcomes = collectives.collect(_attempt(local))
    shares = None
    if outcomes is not None:
        decided, failure = _attempt(lambda: decide(_values(outcomes)))
        shares = [(share, None) for share in decided] if decided is not None else [(None, failure)] * len(outcomes)
    return _value_of(collectives.scatter(shares))  # type: ignore[no-any-return]


def to_first_rank(collectives: Collectives, local: Callable[[], T]) -> list[T] | None:
    """Run ``local`` on every rank. Return all values on rank 0 and None on other ranks, which do not wait for rank 0.

    If a rank fails, only rank 0 raises.
    """
    outcomes = collectives.collect(_attempt(local))
    return None if outcomes is None else _values(outcomes)


def on_one_rank(collectives: Collectives, function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 and broadcast its value, or raise the same error on every rank."""
    return _value_of(collectives.broadcast(_attempt(function) if collectives.rank == 0 else None))  # type: ignore[no-any-return]


_Failure = tuple[type[TimelyFreezeError], str]
_Outcome = tuple[Any, _Failure | None]


def _attempt(function: Callable[[], T]) -> tuple[T | None, _Failure | None]:
    """Return the function's value, or its error as plain data. Never raises."""
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
    """Return the values of all ranks; raise one error if some ranks failed."""
    failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
    if failures:
        raise _together(failures, len(outcomes))
    return [value for value, _ in outcomes]


def _together(failures: dict[int, _Failure], size: int) -> TimelyFreezeError:
    """Join the errors of ranks: their common text if all ranks have the same error, else each rank's text."""
    if len(failures) == size and len(set(failures.values())) == 1:
        kind, text = failures[next(iter(failures))]
        return kind(text)
    kinds = {kind for kind, _ in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else RemoteError
    return kind("; ".join(f"rank {rank}: {text}" for rank, (_, text) in failures.items()))


def _header(message: bytes) -> bytes:
    """Return the message's length and digest, which ranks compare."""
    return len(message).to_bytes(8, "little") + hashlib.blake2b(message, digest_size=16).digest()


def _length(header: bytes) -> int:
    return int.from_bytes(header[:8], "little")


def _first_of_each(headers: Sequence[bytes]) -> dict[bytes, int]:
    """Map each header to the first rank that has it."""
    sources: dict[bytes, int] = {}
    for rank, header in enumerate(headers):
        sources.setdefault(header, rank)
    return sources


def _packed(value: Any) -> bytes:
    """Pickle a value and compress it if it is long. The first byte says whether it is compressed.

    A value that cannot be pickled becomes a failure: other ranks wait for a message.
    """
    try:
        data = pickle.dumps(value)
    except Exception as error:
        data = pickle.dumps((None, (RemoteError, f"a value cannot be sent to other ranks: {error}")))
    return b"p" + data if len(data) < _SHORT else b"z" + zlib.compress(data, 1)


def _unpacked(message: bytes) -> Any:
    data = message[1:]
    return pickle.loads(data if message[:1] == b"p" else zlib.decompress(data))
