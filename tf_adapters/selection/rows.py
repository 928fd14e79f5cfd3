"""Selection by rows: whole units as far as the ratio reaches, and of one more unit as many rows as are missing.

Freezing whole tensors is cheapest, for it also spares the activations that only their gradients need. So in each
stratum of equal work one unit at most is frozen in part, and a stage of a single tensor can still meet any ratio.
What cannot be frozen by rows is drawn first, and what its rounding gives or takes the rows give back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tf_adapters.selection.hybrid import shares
from tf_adapters.selection.uniform import round_count, spread, strata
from tf_adapters.units import FreezeUnit, total_work

_EPSILON = 1e-9
_GROUP, _MANY = 8, 1024


@dataclass(frozen=True, slots=True)
class Drawn:
    """Indices of whole frozen units, and (first row, count of rows) of those that are frozen in part."""

    whole: frozenset[int] = frozenset()
    partial: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class RowSelection:
    """Draws what is frozen of one stage.

    For every ratio each row of each unit is frozen with exactly that probability. The frozen work misses
    ``ratio * total`` by less than a row in each stratum (eight of 1,024 or more), unless units without rows hold more
    than rows can make up.
    """

    def __init__(self, units: Sequence[FreezeUnit]) -> None:
        self.units = tuple(units)
        whole = [index for index, unit in enumerate(self.units) if unit.rows <= 1]
        cut = [index for index, unit in enumerate(self.units) if unit.rows > 1]
        work_of_rows = total_work(self.units[index] for index in cut)
        self._whole = [
            ([[whole[place] for place in shape] for shape in shapes], work, smaller + work_of_rows)
            for shapes, work, smaller in strata([self.units[index] for index in whole])
        ]
        self._cut = [
            [[cut[place] for place in shape] for shape in shapes]
            for shapes, _, _ in strata([self.units[index] for index in cut])
        ]

    def draw(self, ratio: float, rng: np.random.Generator) -> Drawn:
        """What an actual freeze ratio in [0, 1] freezes."""
        if ratio <= 0.0:
            return Drawn()
        if ratio >= 1.0:
            return Drawn(frozenset(range(len(self.units))))
        frozen: list[int] = []
        partial: dict[int, tuple[int, int]] = {}
        chance = ratio
        for shapes, work, rest in self._whole:
            members = _shuffled(shapes, rng)
            count, chance = round_count(len(members) * chance, chance, rest / work, rng)
            frozen.extend(spread(members, count, rng))
        for shapes in self._cut:
            members = _shuffled(shapes, rng)
            whole = int(len(members) * chance + _EPSILON)
            part = len(members) * chance - whole
            if part > _EPSILON:
                # Any member may be the one in part, the others share the whole ones: all have the same chance.
                chosen = members.pop(int(rng.integers(len(members))))
                self._freeze_part(chosen, part, rng, frozen, partial)
            if whole:
                frozen.extend(spread(members, whole, rng))
        return Drawn(frozenset(frozen), partial)

    def _freeze_part(
        self, index: int, part: float, rng: np.random.Generator, frozen: list[int], partial: dict[int, tuple[int, int]]
    ) -> None:
        """Freeze a share of a unit's rows, from a random one on; a coin decides about a fraction of a row.

        Of many rows, groups of eight: GPUs multiply slowly what does not begin at a multiple of 16 bytes.
        """
        rows = self.units[index].rows
        group = _GROUP if rows >= _MANY and rows % _GROUP == 0 else 1
        count = group * int(part * rows / group + rng.random())
        if count >= rows:
            frozen.append(index)
        elif count:
            partial[index] = (group * int(rng.integers(rows // group)), count)


class PreferredRowSelection:
    """The hybrids' selection by rows: what is preferred before any other, each pool drawn as ``RowSelection`` does."""

    def __init__(self, units: Sequence[FreezeUnit], preferred: Iterable[int]) -> None:
        self._preferred = tuple(sorted(preferred))
        self._others = tuple(sorted(set(range(len(units))) - set(self._preferred)))
        self._thinned = RowSelection([units[index] for index in self._preferred])
        self._filled = RowSelection([units[index] for index in self._others])

    def draw(self, ratio: float, rng: np.random.Generator) -> Drawn:
        """What an actual freeze ratio in [0, 1] freezes."""
        thinned, filled = shares(ratio, total_work(self._thinned.units), total_work(self._filled.units))
        first = _placed(self._preferred, self._thinned.draw(thinned, rng))
        second = _placed(self._others, self._filled.draw(filled, rng))
        return Drawn(first.whole | second.whole, {**first.partial, **second.partial})


def _shuffled(shapes: Sequence[Sequence[int]], rng: np.random.Generator) -> list[int]:
    return [index for shape in shapes for index in rng.permutation(shape).tolist()]


def _placed(indices: Sequence[int], drawn: Drawn) -> Drawn:
    whole = frozenset(indices[place] for place in drawn.whole)
    return Drawn(whole, {indices[place]: rows for place, rows in drawn.partial.items()})
