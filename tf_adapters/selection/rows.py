"""Rows of a layer's weight that a mask freezes while the layer's other rows train."""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]
"""The rows ``start <= row < stop``."""


@dataclass(frozen=True, slots=True)
class FrozenRows:
    """``count`` frozen output rows from ``first`` on, going round at the end, of the ``total`` that ``names`` have.

    ``names`` are the parameters of one unit: a weight ``[total, inputs]``, with a bias ``[total]`` where a host needs
    the two together. Under tensor parallelism the rows are those of each rank's own shard.
    """

    names: tuple[str, ...]
    first: int
    count: int
    total: int

    @property
    def frozen(self) -> tuple[Span, ...]:
        """The frozen rows, one span or two."""
        return _around(self.first, self.count, self.total)

    @property
    def trained(self) -> tuple[Span, ...]:
        """All other rows, one span or two."""
        return _around((self.first + self.count) % self.total, self.total - self.count, self.total)


def _around(first: int, count: int, total: int) -> tuple[Span, ...]:
    stop = first + count
    if stop <= total:
        return ((first, stop),)
    return (0, stop - total), (first, total)
