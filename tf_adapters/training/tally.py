"""What the masks that were really drawn on a rank have frozen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from tf_adapters.selection.masks import Mask
from tf_adapters.timing.phase import Phase

__all__ = ["MaskTally"]

_MOST_STEPS = 1_024
"""Steps whose frozen share is recorded: enough for monitoring, the ramp and what follows."""


class MaskTally:
    """Counts frozen shares by stage and step, and how often stable freezing froze each parameter."""

    def __init__(self) -> None:
        self._shares: dict[int, list[float]] = defaultdict(list)
        self._frozen: dict[int, Counter[str]] = defaultdict(Counter)
        self._microbatches: Counter[int] = Counter()

    def add(self, step: int, phase: Phase, drawn: Mapping[int, Sequence[Mask]]) -> None:
        """Count the masks of a step: by stage, one for each microbatch."""
        for stage, masks in drawn.items():
            if step <= _MOST_STEPS:
                shares = self._shares[stage]
                shares += [0.0] * (step - 1 - len(shares))  # steps before a resume
                shares.append(sum(mask.share for mask in masks) / len(masks))
            if phase is Phase.STABLE:
                self._microbatches[stage] += len(masks)
                for mask in masks:
                    self._frozen[stage].update(mask.names)

    def frozen_share(self) -> dict[int, tuple[float, ...]]:
        """By stage, the mean over microbatches of the work frozen, as a share of the freezable, in steps 1, 2, ..."""
        return {stage: tuple(shares) for stage, shares in self._shares.items()}

    def parameter_freeze_ratio(self) -> dict[int, dict[str, float]]:
        """By stage and name, the share of stable freezing's microbatches in which a parameter was frozen."""
        return {
            stage: {name: count / self._microbatches[stage] for name, count in sorted(counts.items())}
            for stage, counts in self._frozen.items()
        }
