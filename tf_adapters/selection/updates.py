"""Cumulative updates, the paper's Delta_K: the distance that every unit has moved between two stability checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tf_adapters.selection.encoding import decode, encode
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.sampling import PieceKey

Memory = Mapping[str, np.ndarray]
"""Arrays that a stability metric needs for its next check, by name. ``scores`` are those of the last check."""
UnitPlaces = Mapping[tuple[int, str], int]
"""For each (stage, parameter name), the position of its unit among the units of all stages, in order."""


def unit_places(units: Mapping[int, Sequence[FreezeUnit]]) -> dict[tuple[int, str], int]:
    """Number the units of all stages, stage by stage."""
    ordered = [(stage, unit) for stage in sorted(units) for unit in units[stage]]
    return {(stage, name): place for place, (stage, unit) in enumerate(ordered) for name in unit.names}


@dataclass(frozen=True)
class Snapshot:
    """Sums and samples of the model's values at one moment, read by all ranks together.

    ``numel`` (int64), ``sizes`` (sample sizes, int64) and ``totals`` (float64) have one entry per key. ``samples``
    (float32) holds the samples of all keys in a row. ``seed`` chose the sampled elements.
    """

    seed: int
    keys: tuple[PieceKey, ...]
    numel: np.ndarray
    sizes: np.ndarray
    totals: np.ndarray
    samples: np.ndarray

    def matches(self, other: Snapshot) -> bool:
        """Return whether both hold the same elements. They differ after a change of the sharding or the seed."""
        alike = (self.seed, self.keys) == (other.seed, other.keys)
        return alike and np.array_equal(self.numel, other.numel) and np.array_equal(self.sizes, other.sizes)

    def to_json(self) -> dict[str, Any]:
        keys = [[stage, name, list(part)] for stage, name, part in self.keys]
        arrays = {"numel": self.numel, "sizes": self.sizes, "totals": self.totals, "samples": self.samples}
        return {"seed": self.seed, "keys": keys, **{name: encode(array) for name, array in arrays.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        keys = tuple((stage, name, tuple(part)) for stage, name, part in data["keys"])
        return cls(data["seed"], keys, *(decode(data[name]) for name in ("numel", "sizes", "totals", "samples")))


@dataclass(frozen=True)
class Updates:
    """Delta_K of every unit.

    ``mean`` and ``numel`` are ``[units]``; ``unit_of``, ``weight`` and ``delta`` are ``[samples]``. ``mean`` is exact,
    over all elements. Results from samples are estimates: each sampled element represents ``weight`` elements of unit
    ``unit_of``.
    """

    units: int
    unit_of: np.ndarray
    weight: np.ndarray
    delta: np.ndarray
    mean: np.ndarray
    numel: np.ndarray

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot, places: UnitPlaces) -> Updates:
        """Compare two matching snapshots. Pieces that belong to no unit (``places``) are ignored."""
        units = 1 + max(places.values(), default=-1)
        known = np.array([(stage, name) in places for stage, name, _ in after.keys], bool)
        place = np.array([places.get((stage, name), 0) for stage, name, _ in after.keys], np.int64)
        numel = _summed(place, np.where(known, after.numel, 0), units)
        with np.errstate(invalid="ignore"):  # weights that are not finite
            shifts = after.totals - before.totals
            delta = after.samples.astype(np.float64) - before.samples
        sampled = np.repeat(known, after.sizes)
        return cls(
            units=units,
            unit_of=np.repeat(place, after.sizes)[sampled],
            weight=np.repeat(after.numel / after.sizes, after.sizes)[sampled],
            delta=delta[sampled],
            mean=_summed(place, np.where(known, shifts, 0.0), units) / np.maximum(numel, 1),
            numel=numel,
        )

    def sums(self, of_samples: np.ndarray) -> np.ndarray:
        """Estimate the sum over each unit's elements from values of the sampled ones."""
        return _summed(self.unit_of, of_samples * self.weight, self.units)

    @property
    def mean_abs(self) -> np.ndarray:
        """Estimated mean of |Delta| over each unit's elements."""
        mean: np.ndarray = self.sums(np.abs(self.delta)) / np.maximum(self.numel, 1)
        return mean


def _summed(places: np.ndarray, values: np.ndarray, length: int) -> np.ndarray:
    summed: np.ndarray = np.bincount(places, weights=values, minlength=length)
    return summed


def by_stage(units: Mapping[int, Sequence[FreezeUnit]], chosen: Iterable[bool]) -> dict[int, frozenset[int]]:
    """Turn one flag per unit of all stages into the chosen indices of each stage."""
    flags = iter(chosen)
    return {stage: frozenset(i for i, _ in enumerate(units[stage]) if next(flags)) for stage in sorted(units)}
