"""The masks of every stage, as a pure function of (seed, step, stage), of the ratios and of what is preferred."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.hybrid import HybridSelection
from tf_adapters.selection.uniform import UniformSelection
from tf_adapters.selection.units import FreezeUnit, frozen_share, limited, preferred_share


@dataclass(frozen=True, slots=True)
class Mask:
    """What is frozen while one microbatch passes one stage.

    ``names`` are frozen, ``share`` of the stage's freezable work (``frozen_share``). ``complete``: no weight gradient
    is left to compute, which is always so on a stage that trains nothing.
    """

    names: tuple[str, ...] = ()
    share: float = 0.0
    complete: bool = False


_Selection = UniformSelection | HybridSelection
_Drawn = tuple[int, tuple[float, ...], frozenset[int]]
NOTHING_FROZEN = Mask()
NONE_PREFERRED: frozenset[int] = frozenset()
NO_CAPS: Mapping[str, float] = {}


class StageMasks:
    """Draws masks from nothing but its arguments, so replicas agree without talking and a restart repeats them.

    ``units`` holds every stage of the pipeline, not only this rank's: any rank can then tell what any other
    freezes, which tied parameters need. What a pattern of ``exclude`` matches is never frozen and counts as no work;
    what a pattern of ``caps`` matches is frozen with its cap, in [0, 1], times the ratio. With ``tokens`` masks name no
    parameter: ``share`` is of every weight gradient's work. ConfigError for a pattern that matches nothing.
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[FreezeUnit]],
        seed: int,
        exclude: Sequence[str] = (),
        caps: Mapping[str, float] = NO_CAPS,
        tokens: bool = False,
    ) -> None:
        self.units = limited(units, exclude, caps)  # what can be frozen, by stage
        self._tokens = tokens
        self._excludes = {stage: len(self.units[stage]) < len(of_stage) for stage, of_stage in units.items()}
        self._uniform = {stage: _selection(of_stage) for stage, of_stage in self.units.items()}
        self._hybrid: dict[int, tuple[frozenset[int], _Selection]] = {}  # the newest of each stage
        self._drawn: dict[int, tuple[_Drawn, tuple[Mask, ...]]] = {}  # the newest of each stage
        self._names = {s: tuple(n for unit in of_stage for n in unit.names) for s, of_stage in self.units.items()}
        self._seed = seed

    def leave_unsampled(self, stage: int, names: Iterable[str]) -> None:
        """Where masks are of tokens: sample none of these parameters' gradients from now on, as if excluded."""
        left = frozenset(names)
        if not self._tokens or left.isdisjoint(self._names[stage]):
            return
        self.units[stage] = units = tuple(unit for unit in self.units[stage] if left.isdisjoint(unit.names))
        self._names[stage] = tuple(name for unit in units for name in unit.names)
        self._excludes[stage] = True
        self._drawn.pop(stage, None)

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self.units))

    @property
    def first_training_stage(self) -> int | None:
        """The first stage that trains anything, frozen now and then or never."""
        return next((stage for stage in self.stages if self.units[stage] or self._excludes[stage]), None)

    def can_freeze_all(self, stage: int) -> bool:
        """Whether a ratio of 1 freezes everything that a stage trains."""
        return not self._excludes[stage] and all(unit.cap == 1.0 for unit in self.units[stage])

    def excludes(self, stage: int) -> bool:
        """Whether a stage trains something that no mask ever freezes."""
        return self._excludes[stage]

    def draw(
        self, step: int, stage: int, ratios: Sequence[float], preferred: frozenset[int] = NONE_PREFERRED
    ) -> tuple[Mask, ...]:
        """The masks of a step's microbatches on a stage, whose actual freeze ratios in [0, 1] these are.

        Units at ``preferred`` are frozen before any other. The newest draw of a stage is remembered.
        """
        wanted = (step, tuple(ratios), preferred)
        if stage not in self._drawn or self._drawn[stage][0] != wanted:
            self._drawn[stage] = wanted, tuple(self._masks(step, stage, ratios, preferred))
        return self._drawn[stage][1]

    def _masks(self, step: int, stage: int, ratios: Sequence[float], preferred: frozenset[int]) -> Iterator[Mask]:
        units = self.units[stage]
        if self._tokens:
            yield from (Mask(share=ratio if units else 0.0) for ratio in ratios)
            return
        rng = np.random.default_rng([self._seed, step, stage])
        for frozen in self._selection_of(stage, preferred).draw(ratios, rng):
            yield self.of_units(stage, frozen)

    def of_units(self, stage: int, frozen: frozenset[int]) -> Mask:
        """The mask that freezes the units of a stage at ``frozen`` and no other."""
        units = self.units[stage]
        complete = len(frozen) == len(units) and not self._excludes[stage]
        names = tuple(name for index in sorted(frozen) for name in units[index].names)
        return Mask(names, frozen_share(units, frozen), complete)

    def names(self, stage: int) -> tuple[str, ...]:
        return self._names[stage]

    def caps(self, stage: int) -> Mapping[str, float]:
        """By parameter that can be frozen, how often it is at a ratio of 1, in (0, 1]."""
        return {name: unit.cap for unit in self.units[stage] for name in unit.names}

    def share(self, stage: int, chosen: frozenset[int]) -> float:
        """The ratio at which a mask that prefers the units at ``chosen`` freezes them and no other, in [0, 1]."""
        return preferred_share(self.units[stage], chosen)

    def _selection_of(self, stage: int, preferred: frozenset[int]) -> _Selection:
        if not preferred:
            return self._uniform[stage]
        if stage not in self._hybrid or self._hybrid[stage][0] != preferred:
            self._hybrid[stage] = preferred, _selection(self.units[stage], preferred)
        return self._hybrid[stage][1]


def _selection(units: Sequence[FreezeUnit], preferred: frozenset[int] = NONE_PREFERRED) -> _Selection:
    return HybridSelection(units, preferred) if preferred else UniformSelection(units)
