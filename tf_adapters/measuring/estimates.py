"""Robust estimates: medians, their standard errors, shrinkage; and grouping of values by key."""

from __future__ import annotations

import functools
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

# For normal noise: standard deviation / median absolute deviation, and error of a median / error of a mean.
_SIGMA_PER_MAD = 1.4826
_MEDIAN_ERROR = 1.2533


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and its standard error, both in the samples' unit."""

    value: float
    error: float


def grouped(values: Iterable[tuple[_K, _V]]) -> dict[_K, list[_V]]:
    """Return the values of each key, in order."""
    groups: dict[_K, list[_V]] = {}
    for key, value in values:
        groups.setdefault(key, []).append(value)
    return groups


def merged(maps: Iterable[Mapping[_K, _V]], combine: Callable[[_V, _V], _V]) -> dict[_K, _V]:
    """Combine the values of all maps for each key."""
    every = grouped(item for one in maps for item in one.items())
    return {key: functools.reduce(combine, values) for key, values in every.items()}


def median(values: Iterable[float]) -> float | None:
    """Return the median; None without values."""
    items = list(values)
    return float(statistics.median(items)) if items else None


def weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the value with half of the weight on each side, from pairs (value, weight); of two the lower one."""
    ordered = sorted(weighted)
    passed = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(passed, passed[-1] / 2.0)][0]


def estimate(values: Iterable[float]) -> Estimate | None:
    """Return the median and its error from the median absolute deviation, both robust. None without values."""
    items = list(values)
    middle = median(items)
    if middle is None:
        return None
    deviation = median(abs(item - middle) for item in items) or 0.0
    return Estimate(middle, _MEDIAN_ERROR * _SIGMA_PER_MAD * deviation / math.sqrt(len(items)))


def shrink(estimates: Mapping[_K, Estimate]) -> dict[_K, float]:
    """Shrink estimates of similar quantities towards their common median, as far as noise explains their differences.

    This is empirical Bayes (James and Stein): it removes the part of the variance between the estimates that their
    errors explain. Differences that are larger than the noise stay; equal quantities become equal.
    """
    values = [e.value for e in estimates.values()]
    if len(values) < 2:
        return {key: e.value for key, e in estimates.items()}
    middle = statistics.median(values)
    noise = statistics.fmean(e.error**2 for e in estimates.values())
    between = statistics.variance(values)
    kept = max(0.0, 1.0 - noise / between) if between > 0.0 else 0.0
    return {key: middle + kept * (e.value - middle) for key, e in estimates.items()}
