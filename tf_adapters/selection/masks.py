"""The masks of every stage: a pure function of (seed, step, stage), the ratios and the preferred units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.freeze_units import FreezeUnit, freezable_work, frozen_share, limited
from tf_adapters.selection.hybrid import HybridSelection
from tf_adapters.selection.uniform import UniformSelection


@dataclass(frozen=True, slots=True)
class Mask:
    """The frozen parameters of one stage for one microbatch.

    ``names`` are frozen; they are ``share`` of the stage's freezable work (``frozen_share``). ``complete`` means that
    no weight gradient is left to compute. It is always true on a stage that trains nothing.
    """

    names: tuple[str, ...] = ()
    share: float = 0.0
    complete: bool = False


_Drawn = tuple[int, tuple[float, ...], frozenset[int]]
NOTHING_FROZEN = Mask()
NONE_PREFERRED: frozenset[int] = frozenset()


class StageMasks:
    """Draws masks from its arguments alone, so replicas agree without communication and a restart repeats them.

    ``units`` holds every stage of the pipeline, not only this rank's: tied parameters need the masks of other ranks.
    Parameters that match a pattern of ``exclude`` are never frozen and count as no work. Those that match a pattern of
    ``caps`` are frozen with probability cap * ratio, with the cap in [0, 1]. With ``tokens`` a mask names no parameter,
    and ``share`` applies to every weight gradient. Raises ConfigError for a pattern that matches nothing.
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[FreezeUnit]],
        seed: int,
        exclude: Sequence[str] = (),
        caps: Mapping[str, float] | None = None,
        tokens: bool = False,
    ) -> None:
        self.units = limited(units, exclude, caps or {})  # freezable units by stage
        self._tokens = tokens
        # By stage, true if the stage trains parameters that no mask freezes.
        self.excludes = {stage: len(self.units[stage]) < len(of_stage) for stage, of_stage in units.items()}
        self._all_units, self._all_excludes = dict(self.units), dict(self.excludes)
        self._uniform = {stage: UniformSelection(of_stage) for stage, of_stage in self.units.items()}
        self._hybrid: dict[int, tuple[frozenset[int], HybridSelection]] = {}  # the newest of each stage
        self._drawn: dict[int, tuple[_Drawn, tuple[Mask, ...]]] = {}  # the newest of each stage
        self._seed = seed

    def leave_unsampled(self, stage: int, names: Iterable[str]) -> None:
        """With tokens: treat just these parameters as excluded from now on: their gradients use all tokens."""
        if not self._tokens:
            return
        left = frozenset(names)
        sampled = tuple(unit for unit in self._all_units[stage] if left.isdisjoint(unit.names))
        if sampled == self.units[stage]:
            return
        self.units[stage] = sampled
        self.excludes[stage] = self._all_excludes[stage] or len(sampled) < len(self._all_units[stage])
        self._drawn.pop(stage, None)

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self.units))

    @property
    def first_training_stage(self) -> int | None:
        """The first stage that trains any parameter."""
        return next((stage for stage in self.stages if self.units[stage] or self.excludes[stage]), None)

    def can_freeze_all(self, stage: int) -> bool:
        """Return whether a ratio of 1 freezes all parameters that the stage trains."""
        return not self.excludes[stage] and all(unit.cap == 1.0 for unit in self.units[stage])

    def draw(
        self, step: int, stage: int, ratios: Sequence[float], preferred: frozenset[int] = NONE_PREFERRED
    ) -> tuple[Mask, ...]:
        """Return the masks of all microbatches of a step on one stage, for actual freeze ratios in [0, 1].

        Units at indices ``preferred`` are frozen first. The newest draw of each stage is cached.
        """
        wanted = (step, tuple(ratios), preferred)
        if stage not in self._drawn or self._drawn[stage][0] != wanted:
            self._drawn[stage] = wanted, self._masks(step, stage, ratios, preferred)
        return self._drawn[stage][1]

    def _masks(self, step: int, stage: int, ratios: Sequence[float], preferred: frozenset[int]) -> tuple[Mask, ...]:
        if self._tokens:
            return tuple(Mask(share=ratio if self.units[stage] else 0.0) for ratio in ratios)
        rng = np.random.default_rng([self._seed, step, stage])
        return tuple(self.of_units(stage, frozen) for frozen in self._selection(stage, preferred).draw(ratios, rng))

    def of_units(self, stage: int, frozen: frozenset[int]) -> Mask:
        """Return the mask that freezes exactly the stage's units at indices ``frozen``."""
        units = self.units[stage]
        complete = len(frozen) == len(units) and not self.excludes[stage]
        names = tuple(name for index in sorted(frozen) for name in units[index].names)
        return Mask(names, frozen_share(units, frozen), complete)

    def names(self, stage: int) -> tuple[str, ...]:
        return tuple(name for unit in self.units[stage] for name in unit.names)

    def caps(self, stage: int) -> Mapping[str, float]:
        """Cap of each freezable parameter: its probability to be frozen at a ratio of 1, in (0, 1]."""
        return {name: unit.cap for unit in self.units[stage] for name in unit.names}

    def share(self, stage: int, chosen: frozenset[int]) -> float:
        """Return the ratio, in [0, 1], at which a mask that prefers the units at ``chosen`` freezes only these."""
        units = self.units[stage]
        total = freezable_work(units)
        return freezable_work(units[index] for index in chosen) / total if total else 0.0

    def _selection(self, stage: int, preferred: frozenset[int]) -> UniformSelection | HybridSelection:
        if not preferred:
            return self._uniform[stage]
        if stage not in self._hybrid or self._hybrid[stage][0] != preferred:
            self._hybrid[stage] = preferred, HybridSelection(self.units[stage], preferred)
        return self._hybrid[stage][1]
