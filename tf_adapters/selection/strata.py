"""Strata: units of equal work, and how a common chance becomes whole numbers of them without changing any chance.

Tensors differ in size by orders of magnitude, so independent coin flips, or a share of the *number* of tensors, would
miss the planned work by far in a single draw. This is dependent rounding instead: strata of equal work, the largest
first; what rounding gives or takes in one stratum, the smaller ones after it give back. Units with a cap below 1 are
frozen that much more rarely, and form strata of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.units import FreezeUnit

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Stratum:
    """Units of equal work and cap, by shape, and what is left to draw after them.

    ``smaller`` is the freezable work of all later strata. ``ceiling`` is how far the common chance may rise there
    before a unit's own, that times its cap, is 1.
    """

    shapes: list[list[int]]
    work: float
    cap: float
    smaller: float
    ceiling: float

    def shuffled(self, rng: np.random.Generator) -> list[int]:
        """All of its units, shape by shape, in random order."""
        return [index for shape in self.shapes for index in rng.permutation(shape).tolist()]


def draw_whole(drawn: Iterable[Stratum], chance: float, rng: np.random.Generator) -> frozenset[int]:
    """Indices of frozen units, each frozen with ``chance`` times its cap."""
    frozen: list[int] = []
    for stratum in drawn:
        members = stratum.shuffled(rng)
        expected, room = len(members) * chance * stratum.cap, stratum.smaller / stratum.work
        count, chance = _round(expected, chance, ceiling=stratum.ceiling, room=room, rng=rng)
        frozen.extend(_spread(members, count, rng))
    return frozenset(frozen)


def strata(units: Iterable[tuple[int, FreezeUnit]]) -> list[Stratum]:
    """Units with their indices by work and cap, the largest work first."""
    grouped: dict[tuple[float, float], dict[tuple[int, ...], list[int]]] = {}
    for index, unit in units:
        grouped.setdefault((unit.work, unit.cap), {}).setdefault(unit.shape, []).append(index)
    found: list[Stratum] = []
    smaller, highest = 0.0, 0.0
    for work, cap in sorted(grouped):
        by_shape = grouped[work, cap]
        shapes = [by_shape[shape] for shape in sorted(by_shape)]
        found.append(Stratum(shapes, work, cap=cap, smaller=smaller, ceiling=1.0 / highest if highest else 1.0))
        smaller += work * cap * sum(map(len, shapes))
        highest = max(highest, cap)
    return found[::-1]


def _round(expected: float, chance: float, ceiling: float, room: float, rng: np.random.Generator) -> tuple[int, float]:
    """Round the expected count of a stratum; returns it and the common chance left for the smaller units.

    ``room`` is the smaller units' freezable work in units of this stratum. The fractional unit moves up to frozen or
    down to trainable while the smaller units' common chance moves the other way, so that the expected work stays.
    Both moves are a fair game, so no unit's probability changes. Where that chance would leave [0, ceiling] the unit
    stops half way and a coin decides: only there is work gained or lost.
    """
    whole = int(expected + _EPSILON)
    part = max(0.0, expected - whole)
    if part < _EPSILON:
        return whole, chance
    up = min(1.0 - part, chance * room)
    down = min(part, (ceiling - chance) * room)
    if up + down > 0.0:
        move = up if rng.random() * (up + down) < down else -down
        part += move
        chance = min(ceiling, max(0.0, chance - move / room))
    return whole + int(rng.random() < part), chance


def _spread(members: list[int], count: int, rng: np.random.Generator) -> list[int]:
    """``count`` of the members by systematic sampling: the same chance for each, floor or ceil in every run of them."""
    edges = np.floor(np.arange(len(members) + 1) * (count / len(members)) + rng.random())
    return [member for member, taken in zip(members, np.diff(edges) > 0, strict=True) if taken]
