"""Uniform selection: every parameter has the same chance to be frozen, and nearly the exact work is frozen.

Paper section 3.3 freezes parameters uniformly at random; its convergence proof needs the marginals to be equal.
``strata`` says how the work is met. Where units have rows, of one unit in each stratum as many are frozen as are
missing: freezing whole tensors is cheapest, for it also spares the activations that only their gradients need, and a
stage of a single tensor can still meet any ratio. What cannot be frozen by rows is drawn first, and what its rounding
gives or takes the rows give back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tf_adapters.selection.strata import draw_whole, spread, strata
from tf_adapters.selection.units import FreezeUnit

_EPSILON = 1e-9
_GROUP, _MANY = 8, 1024


@dataclass(frozen=True, slots=True)
class Drawn:
    """Indices of whole frozen units, and (first row, count of rows) of those that are frozen in part."""

    whole: frozenset[int] = frozenset()
    partial: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class UniformSelection:
    """Draws what is frozen of one stage.

    For every ratio each unit, and each row of one, is frozen with exactly that probability, times the unit's cap. The
    frozen work misses ``ratio`` times the freezable work by less than one unit of the first stratum whose rounding the
    smaller units together cannot make up for; by less than a row in each stratum (eight of 1,024 or more) where the
    units that have rows can make up for the others.
    """

    def __init__(self, units: Sequence[FreezeUnit]) -> None:
        self.units = tuple(units)
        self._every = _Pool(enumerate(self.units))
        self._certain = frozenset(index for index, unit in enumerate(self.units) if unit.cap >= 1.0)
        self._uncertain = _Pool((index, unit) for index, unit in enumerate(self.units) if unit.cap < 1.0)

    def draw(self, ratio: float, rng: np.random.Generator) -> Drawn:
        """What an actual freeze ratio in [0, 1] freezes."""
        if ratio <= 0.0:
            return Drawn()
        if ratio >= 1.0:  # units that are frozen for certain have no chance to give
            drawn = self._uncertain.draw(1.0, rng)
            return Drawn(self._certain | drawn.whole, drawn.partial)
        return self._every.draw(ratio, rng)


class _Pool:
    """Units that are drawn with one common chance, those without rows first."""

    def __init__(self, units: Iterable[tuple[int, FreezeUnit]]) -> None:
        given = dict(units)
        cut = {index: unit for index, unit in given.items() if unit.rows > 1}
        self._rows = {index: unit.rows for index, unit in cut.items()}
        whole = ((index, unit) for index, unit in given.items() if index not in cut)
        self._whole = strata(whole, after=tuple(cut.values()))
        self._cut = strata(cut.items())

    def draw(self, chance: float, rng: np.random.Generator) -> Drawn:
        """Each row is frozen with ``chance`` times its unit's cap."""
        frozen, chance = draw_whole(self._whole, chance, rng)
        partial: dict[int, tuple[int, int]] = {}
        for stratum in self._cut:
            members = stratum.shuffled(rng)
            expected = len(members) * chance * stratum.cap
            whole = int(expected + _EPSILON)
            if expected - whole > _EPSILON:
                # Any member may be the one in part, the others share the whole ones: all have the same chance.
                chosen = members.pop(int(rng.integers(len(members))))
                self._freeze_part(chosen, expected - whole, rng=rng, frozen=frozen, partial=partial)
            if whole:
                frozen.extend(spread(members, whole, rng))
        return Drawn(frozenset(frozen), partial)

    def _freeze_part(
        self, index: int, part: float, rng: np.random.Generator, frozen: list[int], partial: dict[int, tuple[int, int]]
    ) -> None:
        """Freeze a share of a unit's rows, from a random one on; a coin decides about a fraction of a row.

        Of many rows, groups of eight: GPUs multiply slowly what does not begin at a multiple of 16 bytes.
        """
        rows = self._rows[index]
        group = _GROUP if rows >= _MANY and rows % _GROUP == 0 else 1
        count = group * int(part * rows / group + rng.random())
        if count >= rows:
            frozen.append(index)
        elif count:
            partial[index] = (group * int(rng.integers(rows // group)), count)
