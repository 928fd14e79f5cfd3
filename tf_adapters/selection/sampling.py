"""How far parameters have moved since the last stability check, from a fixed sample of their elements.

Two more copies of the model would tell exactly; a sample tells almost as well and costs next to nothing. Which
elements are in it is a function of the seed and the parameter's name alone, so replicas and restarts take the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

SAMPLE = 4096  # elements of one piece, at most
_SMALLEST = 256  # biases and norms are a small part of a model, and few of their elements say little
_ONE_IN = 100
_CHUNK = 1 << 22

PieceKey = tuple[int, str, tuple[int, ...]]
"""Stage, parameter name, and which part of the parameter."""


@dataclass(frozen=True)
class Piece:
    """Values of a parameter that one rank holds, as its optimizer updates them: fp32 masters where there are any.

    ``part`` tells the shards of one parameter apart; ranks that hold the same values give the same ``part``.
    """

    values: torch.Tensor
    part: tuple[int, ...] = ()


HeldValues = Callable[[int, str], Sequence[Piece]]
"""What this rank holds of a parameter, by stage and name: all of it, shards of it, or nothing."""


@dataclass(frozen=True)
class PieceReading:
    """One piece at one moment: its number of elements, their sum (float64), and the sampled ones (float32)."""

    numel: int
    total: float
    sample: np.ndarray


Readings = Mapping[PieceKey, PieceReading]


def whole_parameters(parameters: Mapping[int, Mapping[str, torch.Tensor]]) -> HeldValues:
    """The values of ordinary parameters, which every replica holds whole."""
    return lambda stage, name: (Piece(parameters[stage][name]),)


def sample_size(numel: int) -> int:
    """How many elements of a piece are sampled: 1%, at least 256 (or all there are) and at most 4,096."""
    return min(numel, SAMPLE, max(_SMALLEST, numel // _ONE_IN))


def sample_indices(seed: int, key: PieceKey, numel: int) -> np.ndarray:
    """Ascending indices (int64) of a piece's sampled elements: one at random in each of as many equal runs."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    rng = np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
    size = sample_size(numel)
    places = (np.arange(size) + rng.random(size)) * (numel / size)
    return np.minimum(places.astype(np.int64), numel - 1)


def read(seed: int, pieces: Iterable[tuple[PieceKey, torch.Tensor]]) -> dict[PieceKey, PieceReading]:
    """Read pieces of one device; they are copied from it together, with one wait."""
    keys, sizes, samples, totals = [], [], [], []
    for key, values in pieces:
        flat = values.detach().reshape(-1)
        if flat.numel():
            indices = torch.from_numpy(sample_indices(seed, key, flat.numel())).to(flat.device)
            keys.append(key)
            sizes.append((flat.numel(), len(indices)))
            samples.append(flat[indices].float())
            totals.append(_sum(flat))
    if not keys:
        return {}
    # A gradient-free copy: float64 holds what float32 held.
    gathered = torch.cat([torch.stack(totals), torch.cat(samples).double()]).cpu().numpy()
    split = np.split(gathered[len(keys) :].astype(np.float32), np.cumsum([size for _, size in sizes])[:-1])
    return {
        key: PieceReading(numel, float(total), sample)
        for key, (numel, _), total, sample in zip(keys, sizes, gathered, split, strict=False)
    }


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """In float64, a part at a time: a CPU would make a float64 copy of the whole."""
    return torch.stack([part.sum(dtype=torch.float64) for part in torch.split(flat, _CHUNK)]).sum()
