"""Uniform selection: every parameter has the same chance to be frozen, in one draw for all microbatches of a step.

Paper section 3.3 freezes parameters uniformly at random; its convergence proof needs equal chances. Tensors differ in
size by orders of magnitude, so neither coin flips nor a share of the *number* of tensors would meet the planned work,
and a draw for each microbatch by itself would now and then leave a tensor out of a whole step. This is dependent
rounding instead, over units and microbatches. Units of equal work form a stratum. How many of its units a microbatch
freezes is rounded first, the largest units' stratum before the others; what rounding gives or takes there, the
microbatch's chance of all smaller units gives back. Then the stratum's units are assigned in turn, in random order, to
one microbatch after the other: no unit is frozen twice before each was frozen once.

Source of the rounding: Gandhi et al., Dependent rounding and its applications to approximation algorithms, 2006.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.units import FreezeUnit

_EPSILON = 1e-9


class UniformSelection:
    """Draws what the microbatches of a step freeze of one stage.

    Each unit is frozen in each microbatch with exactly that microbatch's ratio, times the unit's cap. Over the step it
    is frozen in floor or ceiling of its expected number of microbatches. The work that a microbatch freezes misses its
    ratio times the freezable work by less than a unit of the first stratum whose rounding the smaller units together
    cannot make up for.
    """

    def __init__(self, units: Sequence[FreezeUnit]) -> None:
        self.units = tuple(units)
        self._strata = _strata(self.units)

    def draw(self, ratios: Sequence[float], rng: np.random.Generator) -> list[frozenset[int]]:
        """Indices of what each microbatch freezes, whose actual freeze ratios in [0, 1] these are."""
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
    """Units of equal work and cap: their indices, by shape.

    ``smaller`` is the freezable work of all later strata, ``caps`` are theirs.
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
        """So many units for each microbatch, in turn; each shape has about its share of any run of units.

        Every unit may be the first with the same chance, so it falls to a microbatch with its count over the size.
        """
        places = np.concatenate([(np.arange(len(of)) + rng.random()) / len(of) for of in self.shapes])
        order = np.concatenate([rng.permutation(of) for of in self.shapes])[np.argsort(places)]
        first = int(rng.integers(len(order)))
        for count in counts:
            yield order[(first + np.arange(count)) % len(order)].tolist()
            first += count


def _strata(units: Sequence[FreezeUnit]) -> list[_Stratum]:
    """Units by work and cap, the largest work first."""
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
    """Rounds how many units of a stratum each microbatch freezes.

    Two microbatches whose expected count has a fraction pass part of a unit from one to the other, while their chances
    of the smaller units move the other way, so that the expected work of both stays. Either direction is a fair game,
    so no unit's chance changes. It ends where one of the two has a whole count, or where a chance is at its bound.
    What is left of a fraction then is passed with compensation for the other one alone, where the sum of the chances
    may change, and at last without any: only there is work gained or lost.

    One more place, behind the microbatches', makes the total whole. Its "chance" is how far the sum of the others may
    grow: each smaller unit's expected number of microbatches, its cap times that sum, keeps between the floor and the
    ceiling that ``mean``, the sum at first, gives it.
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
        self._price = stratum.work / stratum.smaller if stratum.smaller else 0.0  # of a unit, in chance of smaller ones

    def rounded(self, rng: np.random.Generator) -> tuple[list[int], list[float]]:
        """Whole counts, and the chances of smaller units that are left to the microbatches."""
        places = list(range(len(self._parts)))
        if self._price:
            parted = self._settled(places, places, rng)
            parted = self._settled(parted, [place if self._is_free(place) else places[-1] for place in places], rng)
        else:
            parted = places
        self._settled(parted, None, rng)
        return [whole + round(part) for whole, part in zip(self._whole, self._parts, strict=False)], self._chances[:-1]

    def _settled(self, places: Sequence[int], payers: Sequence[int] | None, rng: np.random.Generator) -> list[int]:
        """Pass parts of units until no two places can; those that still have a part.

        ``payers`` says whose chance compensates a place; without, nothing is compensated.
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
        """Whether the place's chance is off its bounds."""
        return min(self._chances[place], self._highest[place] - self._chances[place]) > _EPSILON

    def _pass(self, giver: int, taker: int, payers: tuple[int, int] | None, rng: np.random.Generator) -> None:
        """Part of a unit goes from one place to the other, or the other way round."""
        there, back = (
            min(self._parts[giver], 1.0 - self._parts[taker]),
            min(self._parts[taker], 1.0 - self._parts[giver]),
        )
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
        """The units whose price the one's chance can gain and the other's lose."""
        return min(self._highest[gains] - self._chances[gains], self._chances[loses]) / self._price
