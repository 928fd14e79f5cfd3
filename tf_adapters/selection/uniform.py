"""Uniform selection: every unit has the same probability to be frozen, in one draw for all microbatches of a step.

Paper section 3.3 freezes parameters uniformly at random, and its convergence proof needs equal probabilities. Tensors
differ in size by orders of magnitude. Independent draws per tensor would therefore miss the planned work, and
independent draws per microbatch could freeze a tensor in a whole step. This module uses dependent rounding over units
and microbatches instead:

1. Units of equal work form a stratum. Strata are visited from the largest work to the smallest.
2. The number of units that each microbatch freezes in the stratum is rounded to an integer. The microbatch's
   probability for all smaller units moves the other way, so that its expected work stays.
3. The stratum's units, in random order, are assigned to one microbatch after the other. No unit is frozen a second time
   before each was frozen once.

Source of the rounding: Gandhi et al., Dependent rounding and its applications to approximation algorithms, 2006.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.freeze_units import FreezeUnit

_EPSILON = 1e-9


class UniformSelection:
    """Draws the frozen units of one stage for each microbatch of a step.

    The probability that a microbatch freezes a unit is exactly the microbatch's ratio times the unit's cap. Over the
    step, a unit is frozen in floor or ceiling of its expected number of microbatches. The frozen work of a microbatch
    is close to ratio * freezable work. The difference is less than the work of one unit of a certain stratum: the
    largest one whose rounding error all smaller units together cannot compensate.
    """

    def __init__(self, units: Sequence[FreezeUnit]) -> None:
        self.units = tuple(units)
        self._strata = _strata(self.units)

    def draw(self, ratios: Sequence[float], rng: np.random.Generator) -> list[frozenset[int]]:
        """Return the indices of the frozen units of each microbatch, for these actual freeze ratios in [0, 1]."""
        frozen: list[list[int]] = [[] for _ in ratios]
        chances = [min(1.0, max(0.0, ratio)) for ratio in ratios]
        mean = sum(chances)
        for stratum in self._strata:
            counts, chances = _Counts(stratum, chances, mean).rounded(rng)
            for of_microbatch, members in zip(frozen, stratum.assigned(counts, rng), strict=True):
                of_microbatch.extend(members)
        return [frozenset(of_microbatch) for of_microbatch in frozen]


@dataclass(frozen=True, slots=True)
class _Stratum:
    """Units of equal work and cap. ``shapes`` has a list of their indices for each shape.

    ``smaller`` is the freezable work of all strata of smaller work, and ``caps`` are the caps of these strata.
    """

    shapes: list[list[int]]
    work: float
    cap: float
    smaller: float
    caps: frozenset[float]

    @property
    def size(self) -> int:
        return sum(map(len, self.shapes))

    def assigned(self, counts: Sequence[int], rng: np.random.Generator) -> Iterator[list[int]]:
        """Assign ``counts[m]`` units to each microbatch m, in turn. Shapes are mixed evenly along the order.

        Each unit is the first with the same probability, so microbatch m gets a unit with probability counts[m] / size.
        """
        places = np.concatenate([(np.arange(len(of)) + rng.random()) / len(of) for of in self.shapes])
        order = np.concatenate([rng.permutation(of) for of in self.shapes])[np.argsort(places)]
        first = int(rng.integers(len(order)))
        for count in counts:
            yield order[(first + np.arange(count)) % len(order)].tolist()
            first += count


def _strata(units: Sequence[FreezeUnit]) -> list[_Stratum]:
    """Group units by work and cap, largest work first."""
    grouped: dict[tuple[float, float], dict[tuple[int, ...], list[int]]] = {}
    for index, unit in enumerate(units):
        grouped.setdefault((unit.work, unit.cap), {}).setdefault(unit.shape, []).append(index)
    strata: list[_Stratum] = []
    smaller, caps = 0.0, frozenset[float]()
    for (work, cap), by_shape in sorted(grouped.items()):
        shapes = [by_shape[shape] for shape in sorted(by_shape)]
        stratum = _Stratum(shapes, work, cap, smaller=smaller, caps=caps)
        strata.append(stratum)
        smaller += work * cap * stratum.size
        caps |= {cap}
    return strata[::-1]


class _Counts:
    """Rounds the number of units of a stratum that each microbatch freezes.

    A *place* is a microbatch with its expected count of frozen units and its *chance*, the probability that it freezes
    a smaller unit (before caps). Two places whose counts have a fraction exchange a part of a unit in a random
    direction. The direction's probabilities leave both expected counts unchanged, so no unit's probability changes. An
    exchange ends when one count is an integer, or when a chance reaches its bound. There are three passes:

    1. Both chances move against the exchange, so that the expected work of both microbatches stays.
    2. Only chances strictly between their bounds move. The chance of the extra place (below) moves instead of the
       others, so the sum of the microbatches' chances changes.
    3. No chance moves. Only this pass gains or loses work.

    One more place, after the microbatches, makes the sum of the counts an integer. Its chance is the amount by which
    the sum of the other chances may still grow. That bound keeps each smaller unit's expected number of microbatches,
    its cap times the sum, between floor and ceiling of its value at the start (``mean`` is that sum).
    """

    def __init__(self, stratum: _Stratum, chances: Sequence[float], mean: float) -> None:
        least = max((math.floor(cap * mean + _EPSILON) / cap for cap in stratum.caps), default=mean)
        most = min((math.ceil(cap * mean - _EPSILON) / cap for cap in stratum.caps), default=mean)
        self._chances = [*chances, most - sum(chances)]
        self._highest = [1.0 / max(stratum.caps, default=1.0)] * len(chances) + [most - least]
        expected = [stratum.size * stratum.cap * chance for chance in chances]
        self._whole = [math.floor(count + _EPSILON) for count in expected]
        self._parts = [count - whole for count, whole in zip(expected, self._whole, strict=True)]
        self._parts.append(math.ceil(sum(self._parts) - _EPSILON) - sum(self._parts))
        self._price = stratum.work / stratum.smaller if stratum.smaller else 0.0  # chance per unit

    def rounded(self, rng: np.random.Generator) -> tuple[list[int], list[float]]:
        """Return the integer counts, and the chances that are left for smaller units."""
        places = list(range(len(self._parts)))
        parted = places
        if self._price:
            parted = self._settled(places, places, rng)
            parted = self._settled(parted, [place if self._is_free(place) else places[-1] for place in places], rng)
        self._settled(parted, None, rng)
        return [whole + round(part) for whole, part in zip(self._whole, self._parts, strict=False)], self._chances[:-1]

    def _settled(self, places: Sequence[int], payers: Sequence[int] | None, rng: np.random.Generator) -> list[int]:
        """Exchange parts of units until no two places can, and return the places whose count still has a fraction.

        ``payers[place]`` is the place whose chance compensates; with None no chance moves.
        """
        parted: list[int] = []
        for place in places:
            for other in parted:
                if payers is None:
                    self._pass(other, place, None, rng)
                elif payers[other] != payers[place]:
                    self._pass(other, place, (payers[other], payers[place]), rng)
            parted = [one for one in (*parted, place) if self._is_parted(one)]
        return parted

    def _is_parted(self, place: int) -> bool:
        return min(self._parts[place], 1.0 - self._parts[place]) > _EPSILON

    def _is_free(self, place: int) -> bool:
        """Return whether the place's chance is strictly between its bounds."""
        return min(self._chances[place], self._highest[place] - self._chances[place]) > _EPSILON

    def _pass(self, giver: int, taker: int, payers: tuple[int, int] | None, rng: np.random.Generator) -> None:
        """Move a part of a unit from one place to the other, in a random direction."""
        there = min(self._parts[giver], 1.0 - self._parts[taker])
        back = min(self._parts[taker], 1.0 - self._parts[giver])
        if payers is not None:
            gains, loses = payers
            there = min(there, self._room(gains, loses))
            back = min(back, self._room(loses, gains))
        if min(there, back) <= 0.0:
            return
        moved = there if rng.random() * (there + back) < back else -back
        self._parts[giver] -= moved
        self._parts[taker] += moved
        if payers is not None:
            self._chances[gains] += moved * self._price
            self._chances[loses] -= moved * self._price

    def _room(self, gains: int, loses: int) -> float:
        """Return the largest part of a unit that the two chances can compensate."""
        return min(self._highest[gains] - self._chances[gains], self._chances[loses]) / self._price
