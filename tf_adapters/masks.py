"""The masks of every stage, as a pure function of (seed, step, stage, microbatch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.uniform import UniformSelection
from tf_adapters.units import FreezeUnit, frozen_share


@dataclass(frozen=True, slots=True)
class Mask:
    """What is frozen while one microbatch passes one stage. ``share`` is of the stage's work, in [0, 1]."""

    names: tuple[str, ...] = ()
    share: float = 0.0
    complete: bool = False


NOTHING_FROZEN = Mask()


class StageMasks:
    """Draws masks from nothing but its arguments, so replicas agree without talking and a restart repeats them.

    ``units`` holds every stage of the pipeline, not only this rank's: any rank can then tell what any other
    freezes, which tied parameters need.
    """

    def __init__(self, units: Mapping[int, Sequence[FreezeUnit]], seed: int) -> None:
        self._units = {stage: tuple(of_stage) for stage, of_stage in units.items()}
        self._selections = {stage: UniformSelection(of_stage) for stage, of_stage in self._units.items()}
        self._names = {s: tuple(n for unit in of_stage for n in unit.names) for s, of_stage in self._units.items()}
        self._seed = seed

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self._units))

    def draw(self, step: int, stage: int, microbatch: int, ratio: float) -> Mask:
        """The mask for an actual freeze ratio in [0, 1]."""
        units = self._units[stage]
        if ratio <= 0.0 or not units:
            return NOTHING_FROZEN
        rng = np.random.default_rng([self._seed, step, stage, microbatch])
        frozen = self._selections[stage].draw(ratio, rng)
        names = tuple(name for index in sorted(frozen) for name in units[index].names)
        return Mask(names, frozen_share(units, frozen), len(frozen) == len(units))

    def names(self, stage: int) -> tuple[str, ...]:
        """Every parameter of a stage that can be frozen."""
        return self._names[stage]
