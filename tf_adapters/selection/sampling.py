"""Fixed samples of parameters' elements, which show how far parameters have moved since the last stability check.

An exact answer would take two more copies of the model. The sampled elements depend only on the seed, the parameter's
name and the size of the sample, so replicas and restarts sample the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

READING_BYTES = 62 * 1024
"""The most bytes of one rank's message in a check, and of the samples of one stage: 64 KB with headers."""

_SAMPLE = 4096  # most elements of one piece
_SMALLEST = 256  # least elements: a few elements of a bias or norm are a poor estimate
_ONE_IN = 100
_TOTAL, _ELEMENT = np.dtype("<f8"), np.dtype("<f4")
_CHUNK = 1 << 22

PieceKey = tuple[int, str, tuple[int, ...]]
"""Stage, parameter name, and the part of the parameter that a rank holds."""


@dataclass(frozen=True)
class ParameterPiece:
    """Values of a parameter that one rank holds and its optimizer updates: the fp32 master copy if there is one.

    ``part`` identifies the shard of the parameter. Ranks that hold the same values give the same ``part``.
    """

    values: torch.Tensor
    part: tuple[int, ...] = ()


HeldValues = Callable[[int, str], Sequence[ParameterPiece]]
"""Return this rank's pieces of a parameter, given by stage and name: the whole, shards, or nothing."""


def whole_parameters(parameters: Mapping[int, Mapping[str, torch.Tensor]]) -> HeldValues:
    """Pieces of ordinary parameters: every replica holds each of them whole."""
    return lambda stage, name: (ParameterPiece(parameters[stage][name]),)


# --- how many elements, and which ----------------------------------------------------------------------------


def sample_sizes(stages: np.ndarray, readers: np.ndarray, numel: np.ndarray) -> np.ndarray:
    """Choose the sample size of each piece. All arrays are int64 ``[pieces]``.

    A sample has 1% of the piece's elements, at least 256 (or all) and at most 4,096. Samples shrink, large ones more
    than small ones, so that neither the samples of one stage nor those of one rank exceed ``READING_BYTES``. A rank
    with more than 5,290 pieces reads only 5,290 of them, evenly spread; the other samples have size 0.
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
    """Return the indices of each value, ascending."""
    order = np.argsort(values, kind="stable")
    groups: list[np.ndarray] = np.split(order, np.flatnonzero(np.diff(values[order])) + 1)
    return groups


def _capped(sizes: np.ndarray, room: int) -> np.ndarray:
    """Shrink samples so that they have at most ``room`` elements in all.

    Each sample keeps one element. A sample that shrinks gets more in proportion to the square root of its size.
    """
    order = np.argsort(sizes, kind="stable")
    more, weights = sizes[order] - 1, np.sqrt(sizes[order])
    left = max(0, room - len(sizes)) - np.cumsum(more) + more  # after the smaller samples
    shares = left / np.cumsum(weights[::-1])[::-1]
    cut = np.flatnonzero(more > shares * weights)
    if not len(cut):
        return sizes
    smaller: np.ndarray = 1 + np.minimum(sizes - 1, (shares[cut[0]] * np.sqrt(sizes)).astype(np.int64))
    return smaller


def sample_indices(seed: int, key: PieceKey, numel: int, size: int) -> np.ndarray:
    """Ascending indices (int64) of a piece's sampled elements: one at random in each of ``size`` equal runs."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    rng = np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
    places = (np.arange(size) + rng.random(size)) * (numel / size)
    return np.minimum(places.astype(np.int64), numel - 1)


# --- what travels --------------------------------------------------------------------------------------------


def read(seed: int, pieces: Iterable[tuple[PieceKey, torch.Tensor, int]]) -> bytes:
    """Read pieces of one device, each with its sample size. All values are copied from the device at once.

    Returns each piece's sum over all elements (float64), then the samples (float32). ``unpacked`` decodes them.
    """
    samples, totals = [], []
    for key, values, size in pieces:
        flat = values.detach().reshape(-1)
        indices = torch.from_numpy(sample_indices(seed, key, flat.numel(), size)).to(flat.device)
        samples.append(flat[indices].float())
        # In parts, since on a CPU one sum would make a float64 copy of the whole tensor.
        totals.append(torch.stack([part.sum(dtype=torch.float64) for part in torch.split(flat, _CHUNK)]).sum())
    if not totals:
        return b""
    # One copy carries the sums and the samples, because float64 holds every float32 value exactly.
    gathered = torch.cat([torch.stack(totals), torch.cat(samples).double()]).cpu().numpy()
    return gathered[: len(totals)].astype(_TOTAL).tobytes() + gathered[len(totals) :].astype(_ELEMENT).tobytes()


def unpacked(reading: bytes, pieces: int) -> tuple[np.ndarray, np.ndarray]:
    """Decode the result of ``read`` for this number of pieces: sums (float64 ``[pieces]``) and samples (float32)."""
    totals = np.frombuffer(reading, _TOTAL, pieces)
    return totals.astype(np.float64), np.frombuffer(reading, _ELEMENT, offset=totals.nbytes).astype(np.float32)
