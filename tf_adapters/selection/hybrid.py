"""The hybrids' selection (paper Algorithm 2): what a base method prefers, thinned or filled at random to the budget.

The budget is a share of the stage's freezable work, AFR times the total, where the paper counts parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tf_adapters.selection.uniform import UniformSelection
from tf_adapters.selection.units import FreezeUnit, freezable_work

_EPSILON = 1e-9


class HybridSelection:
    """Draws what the microbatches of a step freeze of one stage, the units at ``preferred`` before any other.

    Where they hold more work than a microbatch's budget, each of them is frozen with the same probability and nothing
    else is; where they hold less, all of them are frozen and each other unit with the same probability. A cap makes a
    unit's probability that much smaller, "all" included. The expected work is the budget. Each draw is as close to it,
    and as spread over the microbatches, as ``UniformSelection`` makes it among the units that it draws from.
    """

    def __init__(self, units: Sequence[FreezeUnit], preferred: Iterable[int]) -> None:
        self._preferred = tuple(sorted(preferred))
        self._others = tuple(sorted(set(range(len(units))) - set(self._preferred)))
        self._thinned = UniformSelection([units[index] for index in self._preferred])
        self._filled = UniformSelection([units[index] for index in self._others])
        self._preferred_work = freezable_work(self._thinned.units)
        self._other_work = freezable_work(self._filled.units)

    def draw(self, ratios: Sequence[float], rng: np.random.Generator) -> list[frozenset[int]]:
        """Indices of what each microbatch freezes, whose actual freeze ratios in [0, 1] these are."""
        both = [shares(ratio, self._preferred_work, self._other_work) for ratio in ratios]
        thinned = self._thinned.draw([first for first, _ in both], rng)
        filled = self._filled.draw([second for _, second in both], rng)
        return [
            frozenset([*(self._preferred[i] for i in first), *(self._others[i] for i in second)])
            for first, second in zip(thinned, filled, strict=True)
        ]


def shares(ratio: float, preferred: float, others: float) -> tuple[float, float]:
    """The freeze ratios among what is preferred and among the rest, whose work this is, for one of both together."""
    budget = ratio * (preferred + others)
    if budget < preferred * (1.0 - _EPSILON):
        return budget / preferred, 0.0
    rest = budget - preferred
    return 1.0, rest / others if rest > _EPSILON * budget else 0.0
