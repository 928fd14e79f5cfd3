"""Fit a line of time over frozen share, from nothing frozen to everything frozen, to steps of a busy machine.

Most disturbances (another process, the clock rate) slow down a whole step. If the microbatches of one step have
different frozen shares, quotients of their times give the slope and the step's speed cancels. With
``left(x) = pace * (1 - saved * x)``, two samples give ``saved`` for any pace. The fit is the weighted median over all
pairs (Theil and Sen), weighted by the distance of the shares. If all microbatches of a step have about the same share,
they are compared with unfrozen steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tf_adapters.measuring.estimates import Estimate, estimate, weighted_median

_APART = 0.1
"""The least difference of two shares that gives a slope."""

_FEW = 16
"""Up to this number of points in a step, all pairs are used."""

_LEFT = 0.2
"""The least share of the unfrozen time at which a point counts for its step's pace."""


@dataclass(frozen=True, slots=True)
class Point:
    """One sample: the frozen share of the work, and its time as a share of the unfrozen time."""

    share: float
    left: float


def fit(steps: Iterable[Sequence[Point]]) -> Estimate | None:
    """Estimate the saving of full freezing, as a share of the unfrozen time; None if no step had anything frozen."""
    chosen = [points for points in steps if any(point.share > 0.0 for point in points)]
    if not chosen:
        return None
    pairs = [of_step for points in chosen if (of_step := _pairs(points))]
    return _within(chosen, pairs) if pairs else _between(chosen)


_Slope = tuple[float, float]
"""The saving according to one pair or point, and its weight."""


def _pairs(points: Sequence[Point]) -> list[_Slope]:
    slopes = []
    for one, other in _far_apart(sorted(points, key=lambda point: point.share)):
        apart = other.share - one.share
        common = one.left * other.share - other.left * one.share
        if apart >= _APART and common:
            slopes.append(((one.left - other.left) / common, apart))
    return slopes


def _far_apart(points: Sequence[Point]) -> Iterator[tuple[Point, Point]]:
    """Yield all pairs; for many points only pairs that are a quarter to three quarters of them apart."""
    count = len(points)
    distances = range(1, count) if count <= _FEW else (round(count * part / 8) for part in range(2, 7))
    return (pair for distance in distances for pair in zip(points, points[distance:], strict=False))


def _within(steps: Sequence[Sequence[Point]], pairs: Sequence[Sequence[_Slope]]) -> Estimate:
    """Return the slope from pairs within steps, and its error from the spread over steps and over points."""
    saved = weighted_median(slope for of_step in pairs for slope in of_step)
    off, spread = [], []
    for points in steps:
        lines = [1.0 - saved * point.share for point in points]
        paces = [point.left / line for point, line in zip(points, lines, strict=True) if line >= _LEFT]
        pace = statistics.median(paces) if paces else 0.0
        if pace > 0.0:
            middle = statistics.fmean(point.share for point in points)
            off += [point.left / pace - line for point, line in zip(points, lines, strict=True)]
            spread += [(point.share - middle) ** 2 for point in points]
    return Estimate(saved, max(_error(map(weighted_median, pairs)), _scaled(off, spread)))


def _between(steps: Sequence[Sequence[Point]]) -> Estimate:
    """Return the slope against unfrozen steps (least absolute deviations), and its error in the same two ways."""
    frozen = [[point for point in points if point.share > 0.0] for points in steps]
    every = [point for points in frozen for point in points]
    saved = _quotient(every)
    off = [1.0 - point.left - saved * point.share for point in every]
    return Estimate(saved, max(_error(map(_quotient, frozen)), _scaled(off, [point.share**2 for point in every])))


def _quotient(points: Sequence[Point]) -> float:
    """Return the slope of the line through the unfrozen time: by least absolute deviations, a weighted median."""
    return weighted_median(((1.0 - point.left) / point.share, point.share) for point in points)


def _error(values: Iterable[float]) -> float:
    of_values = estimate(values)
    return of_values.error if of_values else math.inf


def _scaled(off: Sequence[float], squares: Sequence[float]) -> float:
    """Return the error of a slope, from its points' residuals ``off`` and the squared distances of their shares."""
    return _error(off) / math.sqrt(statistics.fmean(squares)) if any(squares) else math.inf
