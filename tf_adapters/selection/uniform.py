"""Uniform selection: every parameter has the same chance to be frozen, and nearly the exact work is frozen.

Paper section 3.3 freezes parameters uniformly at random; its convergence proof needs the marginals to be equal.
Tensors differ in size by orders of magnitude, so independent coin flips, or a share of the *number* of tensors,
would miss the planned work by far in a single draw. This is dependent rounding instead: strata of equal work,
the largest first; what rounding gives or takes in one stratum, the smaller ones after it give back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_adapters.units import FreezeUnit

_EPSILON = 1e-9


class UniformSelection:
    """Draws the frozen units of one stage.

    For every ratio each unit is frozen with exactly that probability. The frozen work misses ``ratio * total``
    by less than one unit of the first stratum whose rounding the smaller units together cannot make up for.
    """

    def __init__(self, units: Sequence[FreezeUnit]) -> None:
        self.units = tuple(units)
        self._strata = strata(self.units)

    def draw(self, ratio: float, rng: np.random.Generator) -> frozenset[int]:
        """Indices of the frozen units for an actual freeze ratio in [0, 1]."""
        if ratio <= 0.0:
            return frozenset()
        if ratio >= 1.0:
            return frozenset(range(len(self.units)))
        frozen: list[int] = []
        chance = ratio
        for shapes, work, smaller in self._strata:
            members = [index for shape in shapes for index in rng.permutation(shape).tolist()]
            count, chance = round_count(len(members) * chance, chance, smaller / work, rng)
            frozen.extend(spread(members, count, rng))
        return frozenset(frozen)


def strata(units: Sequence[FreezeUnit]) -> list[tuple[list[list[int]], float, float]]:
    """(members by shape, work of one, work of all smaller strata), the largest work first."""
    by_work: dict[float, dict[tuple[int, ...], list[int]]] = {}
    for index, unit in enumerate(units):
        by_work.setdefault(unit.work, {}).setdefault(unit.shape, []).append(index)
    found: list[tuple[list[list[int]], float, float]] = []
    smaller = 0.0
    for work in sorted(by_work):
        shapes = [by_work[work][shape] for shape in sorted(by_work[work])]
        found.append((shapes, work, smaller))
        smaller += work * sum(map(len, shapes))
    return found[::-1]


def round_count(expected: float, chance: float, room: float, rng: np.random.Generator) -> tuple[int, float]:
    """Round the expected count of a stratum; returns it and the chance left for the smaller units.

    ``room`` is the smaller units' work in units of this stratum. The fractional unit moves up to frozen or down
    to trainable while the smaller units' common chance moves the other way, so that the expected work stays.
    Both moves are a fair game, so no unit's probability changes. Where that chance would leave [0, 1] the unit
    stops half way and a coin decides: only there is work gained or lost.
    """
    whole = int(expected + _EPSILON)
    part = max(0.0, expected - whole)
    if part < _EPSILON:
        return whole, chance
    up = min(1.0 - part, chance * room)
    down = min(part, (1.0 - chance) * room)
    if up + down > 0.0:
        move = up if rng.random() * (up + down) < down else -down
        part += move
        chance = min(1.0, max(0.0, chance - move / room))
    return whole + int(rng.random() < part), chance


def spread(members: list[int], count: int, rng: np.random.Generator) -> list[int]:
    """``count`` of the members by systematic sampling: the same chance for each, floor or ceil in every run of them."""
    edges = np.floor(np.arange(len(members) + 1) * (count / len(members)) + rng.random())
    return [member for member, taken in zip(members, np.diff(edges) > 0, strict=True) if taken]
