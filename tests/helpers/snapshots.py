"""A model as stability checks read it, without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tf_adapters.selection.readers import Held, Readers, sizes_of
from tf_adapters.selection.sampling import PieceKey, read
from tf_adapters.selection.updates import Snapshot


def snapshot_of(*ranks: Mapping[PieceKey, torch.Tensor], seed: int = 0) -> Snapshot:
    """Of what ranks hold, each some pieces."""
    parameters = sorted({key[:2] for rank in ranks for key in rank})
    readers, told = Readers.of([held_by(rank, parameters) for rank in ranks], parameters)
    readings = []
    for rank, sizes in zip(ranks, told, strict=True):
        pieces = zip(rank.items(), sizes_of(sizes, len(rank)), strict=True)
        readings.append(read(seed, ((key, values, size) for (key, values), size in pieces if size)))
    return readers.snapshot(readings, seed)


def held_by(rank: Mapping[PieceKey, torch.Tensor], parameters: Sequence[tuple[int, str]]) -> Held:
    lines = [(parameters.index(key[:2]), key[2], values.numel()) for key, values in rank.items()]
    places, parts, numels = zip(*lines, strict=True) if lines else ((), (), ())
    return places, parts, numels
