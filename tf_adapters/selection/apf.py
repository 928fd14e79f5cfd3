"""APF: parameters whose updates oscillate without a trend are stable (paper section 2.3).

E_K = alpha E_{K-1} + (1 - alpha) Delta_K, the same of |Delta_K|, and the score is |E_K| over that: 1 for a steady
trend, near 0 for oscillation. The formula is one scalar's; freezing saves time for whole tensors only, so a unit has
one score: Delta_K is the mean update of the unit's elements, |Delta_K| the mean of its magnitudes. That is what the
thresholds in the paper's table of settings belong to: a scalar's score stays above about 1/sqrt(K) even when its
updates are nothing but noise, and 0.0001 would never be reached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.updates import Memory, Updates

ALPHA = 0.99
"""Weight of the past in a run's moving averages."""


@dataclass(frozen=True)
class Apf:
    """Tells which units are stable, from check to check.

    Args:
        threshold: T_APF; a unit is stable below it.
        periods: APF alone, which does not train what it freezes: a score then says nothing until the unit has trained
            again. So, as APF has it, a stable unit is frozen for one check longer than the last time, and one that
            came back unstable for half as long, and in between each trains for one interval.
            Without, as in the hybrids, where every unit goes on learning, each check decides anew.
        alpha: weight of the past in the moving averages, in [0, 1).
    """

    threshold: float
    periods: bool
    alpha: float = ALPHA

    def check(self, memory: Memory, updates: Updates) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The memory for the next check, and which units are stable: bools ``[units]``."""
        period = _kept(memory, "period", updates.units).astype(np.int64)
        waiting = _kept(memory, "waiting", updates.units).astype(np.int64)
        trained = waiting == 0
        trend, size = self.averages(memory, updates, trained)
        scores = self.scores(trend, size, updates)
        stable = scores < self.threshold
        averages = {"trend": trend, "size": size, "scores": scores}
        if not self.periods:
            return averages, stable
        period = np.where(trained, np.where(stable, period + 1, period // 2), period)
        waiting = np.where(trained, period, waiting - 1)
        return {**averages, "period": period, "waiting": waiting}, waiting > 0

    def averages(self, memory: Memory, updates: Updates, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """E_K and E_K^abs: ``[units]``. What is not ``trained`` keeps what it had."""
        trend, size = (_kept(memory, name, updates.units) for name in ("trend", "size"))
        rest = 1.0 - self.alpha
        return (
            np.where(trained, self.alpha * trend + rest * updates.mean, trend),
            np.where(trained, self.alpha * size + rest * updates.mean_abs, size),
        )

    def scores(self, trend: np.ndarray, size: np.ndarray, updates: Updates) -> np.ndarray:
        """Effective perturbation of each unit, in [0, 1]: 0 for what has never moved, NaN for what is not finite.

        NaN as well, and so never stable, for a unit of which nothing was read.
        """
        strength = np.abs(trend)
        with np.errstate(invalid="ignore"):
            scores: np.ndarray = np.divide(strength, size, out=np.zeros_like(strength), where=size != 0.0)
        return np.where(updates.numel > 0, np.minimum(1.0, scores), np.nan)


def _kept(memory: Memory, name: str, length: int) -> np.ndarray:
    """What is remembered; zeros where nothing is, or where it is of the elements, as version 2 could have it."""
    found = memory.get(name)
    return found if found is not None and len(found) == length else np.zeros(length)
