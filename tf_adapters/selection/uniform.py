"""Uniform selection: every parameter has the same chance to be frozen, and nearly the exact work is frozen.

Paper section 3.3 freezes parameters uniformly at random; its convergence proof needs the marginals to be equal.
``strata`` says how the work is met.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_adapters.selection.strata import draw_whole, strata
from tf_adapters.selection.units import FreezeUnit


class UniformSelection:
    """Draws what is frozen of one stage.

    For every ratio each unit is frozen with exactly that probability, times the unit's cap. The frozen work misses
    ``ratio`` times the freezable work by less than one unit of the first stratum whose rounding the smaller units
    together cannot make up for.
    """

    def __init__(self, units: Sequence[FreezeUnit]) -> None:
        self.units = tuple(units)
        self._every = strata(enumerate(self.units))
        self._certain = frozenset(index for index, unit in enumerate(self.units) if unit.cap >= 1.0)
        self._uncertain = strata((index, unit) for index, unit in enumerate(self.units) if unit.cap < 1.0)

    def draw(self, ratio: float, rng: np.random.Generator) -> frozenset[int]:
        """Indices of what an actual freeze ratio in [0, 1] freezes."""
        if ratio <= 0.0:
            return frozenset()
        if ratio >= 1.0:  # units that are frozen for certain have no chance to give
            return self._certain | draw_whole(self._uncertain, 1.0, rng)
        return draw_whole(self._every, ratio, rng)
