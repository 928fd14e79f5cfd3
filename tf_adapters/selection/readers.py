"""Choose the rank that reads each part of the model, and the size of its sample.

The choice remains until the ranks hold other parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.sampling import PieceKey, sample_sizes, unpacked
from tf_adapters.selection.updates import Snapshot

Held = tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]
"""The pieces of one rank: each one's parameter (its position among all), its part, and its number of elements."""

_SIZE = np.dtype("<u2")


@dataclass(frozen=True, eq=False)
class Readers:
    """The pieces of the model that are read, and the order in which they arrive.

    ``numel`` and ``sizes`` (sample sizes) belong to ``keys``. ``arrival`` is each key's position among all pieces that
    the ranks send, and ``pieces`` is the number of pieces that each rank sends.
    """

    keys: tuple[PieceKey, ...]
    numel: np.ndarray
    sizes: np.ndarray
    arrival: np.ndarray
    pieces: tuple[int, ...]

    @classmethod
    def of(cls, held: Sequence[Held], parameters: Sequence[tuple[int, str]]) -> tuple[Readers, list[bytes]]:
        """Let the first rank that holds a piece read it, so that other replicas send nothing.

        ``held`` are the pieces of every rank; ``parameters`` are the (stage, name) of all stages, in order. Returns the
        readers and one message per rank: the sample size of each of its pieces, 0 for a piece that it does not read.
        The message is empty for a rank that reads nothing.
        """
        found: dict[PieceKey, tuple[int, int]] = {}
        keys = [[(*parameters[place], part) for place, part, _ in zip(*of_rank, strict=True)] for of_rank in held]
        for rank, of_rank in enumerate(keys):
            for key, numel in zip(of_rank, held[rank][2], strict=True):
                found.setdefault(key, (rank, numel))
        readers, numels = np.array(list(found.values()), np.int64).reshape(-1, 2).T
        sizes = sample_sizes(np.array([stage for stage, _, _ in found], np.int64), readers, numels)
        read = [key for key, size in zip(found, sizes, strict=True) if size]
        arrival = np.array(sorted(range(len(read)), key=read.__getitem__), np.int64)
        size_of = dict(zip(found, sizes.tolist(), strict=True))
        told = []
        for rank, of_rank in enumerate(keys):
            own = [size_of[key] if found[key][0] == rank else 0 for key in of_rank]
            told.append(np.array(own, _SIZE).tobytes() if any(own) else b"")
        chosen = cls(
            keys=tuple(read[place] for place in arrival),
            numel=numels[sizes > 0][arrival],
            sizes=sizes[sizes > 0][arrival],
            arrival=arrival,
            pieces=tuple(np.bincount(readers[sizes > 0], minlength=len(held)).tolist()),
        )
        return chosen, told

    def snapshot(self, readings: Sequence[bytes], seed: int) -> Snapshot:
        """Join the readings of all ranks to a snapshot of the whole model."""
        totals, samples = zip(*map(unpacked, readings, self.pieces), strict=True)
        arrived = np.empty_like(self.sizes)
        arrived[self.arrival] = self.sizes
        each = np.split(np.concatenate(samples), np.cumsum(arrived)[:-1])
        return Snapshot(
            seed,
            self.keys,
            numel=self.numel,
            sizes=self.sizes,
            totals=np.concatenate(totals)[self.arrival],
            samples=np.concatenate([np.zeros(0, np.float32), *(each[place] for place in self.arrival)]),
        )


def sizes_of(told: bytes, pieces: int) -> list[int]:
    """Decode the sample size of each of a rank's pieces from its message."""
    return np.frombuffer(told, _SIZE).tolist() if told else [0] * pieces
