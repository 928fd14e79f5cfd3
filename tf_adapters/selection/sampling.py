"""How far parameters have moved since the last stability check, from a fixed sample of their elements.

Two more copies of the model would tell exactly; a sample tells almost as well and costs next to nothing. Which
elements are in it is a function of the seed, the parameter's name and the sample's size alone, so that replicas and
restarts take the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

READING_BYTES = 62 * 1024
"""What one rank sends of one check, and one stage's samples, at most: 64 KB with all that goes around it."""

_SAMPLE = 4096  # elements of one piece, at most
_SMALLEST = 256  # biases and norms are a small part of a model, and few of their elements say little
_ONE_IN = 100
_TOTAL, _ELEMENT = np.dtype("<f8"), np.dtype("<f4")
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


def whole_parameters(parameters: Mapping[int, Mapping[str, torch.Tensor]]) -> HeldValues:
    """The values of ordinary parameters, which every replica holds whole."""
    return lambda stage, name: (Piece(parameters[stage][name]),)


# --- how many elements, and which ----------------------------------------------------------------------------


def sample_sizes(stages: np.ndarray, readers: np.ndarray, numel: np.ndarray) -> np.ndarray:
    """How many elements of each piece are sampled; all arrays are int64 ``[pieces]``.

    1% of a piece, at least 256 (or all there are) and at most 4,096; less where the samples of a stage would exceed
    ``READING_BYTES`` together, or what one rank reads would: down to one element, large samples more than small ones.
    Where a rank has more pieces than there is room for, 5,290, it reads as many, spread over all of them, and the
    others' samples are of size 0.
    """
    sizes: np.ndarray = np.minimum(np.minimum(numel, _SAMPLE), np.maximum(_SMALLEST, numel // _ONE_IN))
    for of_stage in _alike(stages):
        sizes[of_stage] = _capped(sizes[of_stage], READING_BYTES // _ELEMENT.itemsize)
    most = READING_BYTES // (_TOTAL.itemsize + _ELEMENT.itemsize)
    for of_reader in _alike(readers):
        if len(of_reader) > most:
            read = of_reader[np.arange(most) * len(of_reader) // most]
            sizes[np.setdiff1d(of_reader, read)] = 0
            of_reader = read
        room = READING_BYTES - _TOTAL.itemsize * len(of_reader)
        sizes[of_reader] = _capped(sizes[of_reader], room // _ELEMENT.itemsize)
    return sizes


def _alike(values: np.ndarray) -> list[np.ndarray]:
    """The indices of each value, ascending."""
    order = np.argsort(values, kind="stable")
    groups: list[np.ndarray] = np.split(order, np.flatnonzero(np.diff(values[order])) + 1)
    return groups


def _capped(sizes: np.ndarray, room: int) -> np.ndarray:
    """These samples, or smaller ones that have ``room`` together: an element each, and more by the root of the size."""
    order = np.argsort(sizes, kind="stable")
    more, weights = sizes[order] - 1, np.sqrt(sizes[order])
    left = max(0, room - len(sizes)) - np.cumsum(more) + more  # by what is smaller
    shares = left / np.cumsum(weights[::-1])[::-1]
    cut = np.flatnonzero(more > shares * weights)
    if not len(cut):
        return sizes
    smaller: np.ndarray = 1 + np.minimum(sizes - 1, (shares[cut[0]] * np.sqrt(sizes)).astype(np.int64))
    return smaller


def sample_indices(seed: int, key: PieceKey, numel: int, size: int) -> np.ndarray:
    """Ascending indices (int64) of a piece's sampled elements: one at random in each of as many equal runs."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    rng = np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
    places = (np.arange(size) + rng.random(size)) * (numel / size)
    return np.minimum(places.astype(np.int64), numel - 1)


# --- what travels --------------------------------------------------------------------------------------------


def read(seed: int, pieces: Iterable[tuple[PieceKey, torch.Tensor, int]]) -> bytes:
    """Read pieces of one device, each with the size of its sample; they are copied from it together, with one wait.

    Returns the pieces' sums over all of their elements (float64), then their samples (float32): ``unpacked`` has both.
    """
    samples, totals = [], []
    for key, values, size in pieces:
        flat = values.detach().reshape(-1)
        indices = torch.from_numpy(sample_indices(seed, key, flat.numel(), size)).to(flat.device)
        samples.append(flat[indices].float())
        totals.append(_sum(flat))
    if not totals:
        return b""
    # A gradient-free copy: float64 holds what float32 held.
    gathered = torch.cat([torch.stack(totals), torch.cat(samples).double()]).cpu().numpy()
    return gathered[: len(totals)].astype(_TOTAL).tobytes() + gathered[len(totals) :].astype(_ELEMENT).tobytes()


def unpacked(reading: bytes, pieces: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums (float64 ``[pieces]``) and samples (float32) of what ``read`` returned for as many pieces."""
    totals = np.frombuffer(reading, _TOTAL, pieces)
    return totals.astype(np.float64), np.frombuffer(reading, _ELEMENT, offset=totals.nbytes).astype(np.float32)


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """In float64, a part at a time: a CPU would make a float64 copy of the whole."""
    return torch.stack([part.sum(dtype=torch.float64) for part in torch.split(flat, _CHUNK)]).sum()
