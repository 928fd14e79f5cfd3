"""The masks of every stage, as a pure function of (seed, step, stage, microbatch) and of what is preferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tf_adapters.rows import FrozenRows
from tf_adapters.selection.hybrid import HybridSelection
from tf_adapters.selection.rows import Drawn, PreferredRowSelection, RowSelection
from tf_adapters.selection.uniform import UniformSelection
from tf_adapters.units import FreezeUnit, frozen_share, without


@dataclass(frozen=True, slots=True)
class Mask:
    """What is frozen while one microbatch passes one stage. ``share`` is of the stage's work, in [0, 1].

    ``names`` are frozen whole; of each of ``rows`` a part is frozen, and none of them is among ``names``.
    """

    names: tuple[str, ...] = ()
    share: float = 0.0
    complete: bool = False
    rows: tuple[FrozenRows, ...] = ()


_Selection = UniformSelection | HybridSelection | RowSelection | PreferredRowSelection
NOTHING_FROZEN = Mask()
NONE_PREFERRED: frozenset[int] = frozenset()


class StageMasks:
    """Draws masks from nothing but its arguments, so replicas agree without talking and a restart repeats them.

    ``units`` holds every stage of the pipeline, not only this rank's: any rank can then tell what any other
    freezes, which tied parameters need. What a pattern of ``exclude`` matches is never frozen and counts as no work;
    ConfigError for one that matches nothing. Units that have rows may be frozen in part.
    """

    def __init__(self, units: Mapping[int, Sequence[FreezeUnit]], seed: int, exclude: Sequence[str] = ()) -> None:
        self._units = without(units, exclude)
        self._whole = {stage: len(self._units[stage]) == len(of_stage) for stage, of_stage in units.items()}
        self._uniform = {stage: _selection(of_stage) for stage, of_stage in self._units.items()}
        self._hybrid: dict[int, tuple[frozenset[int], _Selection]] = {}  # the newest of each stage
        self._names = {s: tuple(n for unit in of_stage for n in unit.names) for s, of_stage in self._units.items()}
        self._seed = seed

    @property
    def units(self) -> Mapping[int, Sequence[FreezeUnit]]:
        """What can be frozen, by stage."""
        return self._units

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self._units))

    def can_freeze_all(self, stage: int) -> bool:
        """Whether a mask can freeze everything that a stage trains."""
        return self._whole[stage]

    def draw(
        self, step: int, stage: int, microbatch: int, ratio: float, preferred: frozenset[int] = NONE_PREFERRED
    ) -> Mask:
        """The mask for an actual freeze ratio in [0, 1]; units at ``preferred`` are frozen before any other."""
        units = self._units[stage]
        if ratio <= 0.0 or not units:
            return NOTHING_FROZEN
        rng = np.random.default_rng([self._seed, step, stage, microbatch])
        drawn = self._selection_of(stage, preferred).draw(ratio, rng)
        frozen, partial = (drawn.whole, drawn.partial) if isinstance(drawn, Drawn) else (drawn, {})
        names = tuple(name for index in sorted(frozen) for name in units[index].names)
        rows = tuple(FrozenRows(units[i].names, *partial[i], units[i].rows) for i in sorted(partial))
        share = frozen_share(units, frozen, {index: count for index, (_, count) in partial.items()})
        return Mask(names, share, self._whole[stage] and len(frozen) == len(units), rows)

    def names(self, stage: int) -> tuple[str, ...]:
        """Every parameter of a stage that can be frozen."""
        return self._names[stage]

    def share(self, stage: int, chosen: frozenset[int]) -> float:
        """Share of a stage's work that the units at ``chosen`` hold, in [0, 1]."""
        return frozen_share(self._units[stage], chosen)

    def _selection_of(self, stage: int, preferred: frozenset[int]) -> _Selection:
        if not preferred:
            return self._uniform[stage]
        if stage not in self._hybrid or self._hybrid[stage][0] != preferred:
            self._hybrid[stage] = preferred, _selection(self._units[stage], preferred)
        return self._hybrid[stage][1]


def _selection(units: Sequence[FreezeUnit], preferred: frozenset[int] = NONE_PREFERRED) -> _Selection:
    if any(unit.rows > 1 for unit in units):
        return PreferredRowSelection(units, preferred) if preferred else RowSelection(units)
    return HybridSelection(units, preferred) if preferred else UniformSelection(units)
