"""Selection of the hybrid methods (paper Algorithm 2): units that the base method prefers, fewer or more of them.

The frozen work must equal the budget, AFR times the stage's freezable work. The paper counts parameters instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tf_adapters.selection.freeze_units import FreezeUnit, freezable_work
from tf_adapters.selection.uniform import UniformSelection

_EPSILON = 1e-9


class HybridSelection:
    """Draws the frozen units of one stage for each microbatch of a step, ``preferred`` units first.

    If the preferred units hold more work than a microbatch's budget, each is frozen with the same probability and no
    other unit is. If they hold less, all of them are frozen, and every other unit with the same probability. A unit's
    cap scales its probability in both cases. The expected work equals the budget. ``UniformSelection`` draws within
    each of the two groups, so its error bound and its spread over the microbatches apply.
    """

    def __init__(self, units: Sequence[FreezeUnit], preferred: Iterable[int]) -> None:
        self._preferred = tuple(sorted(preferred))
        self._others = tuple(sorted(set(range(len(units))) - set(self._preferred)))
        self._thinned = UniformSelection([units[index] for index in self._preferred])
        self._filled = UniformSelection([units[index] for index in self._others])
        self._work = freezable_work(self._thinned.units), freezable_work(self._filled.units)

    def draw(self, ratios: Sequence[float], rng: np.random.Generator) -> list[frozenset[int]]:
        """Return the indices of the frozen units of each microbatch, for these actual freeze ratios in [0, 1]."""
        both = [shares(ratio, *self._work) for ratio in ratios]
        thinned = self._thinned.draw([first for first, _ in both], rng)
        filled = self._filled.draw([second for _, second in both], rng)
        return [
            frozenset([*(self._preferred[i] for i in first), *(self._others[i] for i in second)])
            for first, second in zip(thinned, filled, strict=True)
        ]


def shares(ratio: float, preferred: float, others: float) -> tuple[float, float]:
    """Split a freeze ratio of all units into one for the preferred units and one for the others, given their work."""
    budget = ratio * (preferred + others)
    if budget < preferred * (1.0 - _EPSILON):
        return budget / preferred, 0.0
    rest = budget - preferred
    return 1.0, rest / others if rest > _EPSILON * budget else 0.0
