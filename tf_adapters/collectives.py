"""Decisions that every rank takes together: gathered, decided on one rank, broadcast.

A rank that fails locally must not leave the others waiting in a collective, so errors travel as values and every
rank learns of them at the same point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from tf_adapters.errors import TimelyFreezeError

T = TypeVar("T")


class RemoteError(TimelyFreezeError, RuntimeError):
    """A rank failed; every rank raises this with the same text."""


class Collectives(Protocol):
    """What the controller needs of a process group. Every method is called on all ranks at the same point."""

    rank: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""


class ProcessGroupCollectives:
    """Collectives over a torch process group (all ranks by default); values are pickled, so floats stay float64."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        box = [value]
        source = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]


def holds_first_rank(group: Any = None) -> bool:
    """Whether rank 0 of the job is in ``group`` (all ranks by default), one of groups that no two share a rank."""
    return 0 in dist.get_process_group_ranks(group)


class SingleProcess:
    """The trivial group of one rank."""

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


def on_all_ranks(collectives: Collectives, function: Callable[[], T]) -> list[T]:
    """Run ``function`` on every rank and return every rank's value; if it fails on any, raise the same on all."""
    value, failure = _attempt(function)
    outcomes = collectives.gather((value, failure))
    failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
    if failures:
        raise _together(failures, len(outcomes))
    return [value for value, _ in outcomes]


def on_one_rank(collectives: Collectives, function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 and broadcast its value, or raise the same error on every rank."""
    value, failure = collectives.broadcast(_attempt(function) if collectives.rank == 0 else None)
    if failure is not None:
        raise _together({0: failure}, 1)
    return value  # type: ignore[no-any-return]


_Failure = tuple[type[TimelyFreezeError], str]


def _attempt(function: Callable[[], T]) -> tuple[T | None, _Failure | None]:
    """The function's value, or what it failed with as plain data: never an exception."""
    try:
        return function(), None
    except TimelyFreezeError as error:
        return None, (type(error), str(error))
    except Exception as error:
        return None, (RemoteError, f"{type(error).__name__}: {error}")


def _together(failures: dict[int, _Failure], size: int) -> TimelyFreezeError:
    """One error for what failed on some ranks: the common text if all say the same, else each rank's own."""
    if len(failures) == size and len(set(failures.values())) == 1:
        kind, text = failures[next(iter(failures))]
        return kind(text)
    kinds = {kind for kind, _ in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else RemoteError
    return kind("; ".join(f"rank {rank}: {text}" for rank, (_, text) in failures.items()))
