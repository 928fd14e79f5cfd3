"""APF: parameters whose updates oscillate without a trend are stable (paper section 2.3).

E_K = alpha E_{K-1} + (1 - alpha) Delta_K, and E_K^abs is the same average of |Delta_K|. The score is |E_K| / E_K^abs:
1 for a steady trend, near 0 for oscillation. The paper defines it for one scalar. Freezing saves time for whole tensors
only, so each unit gets one score: Delta_K is the mean update of the unit's elements, and |Delta_K| the mean of their
magnitudes. The thresholds in the paper's table of settings need this score: a scalar's score stays above about
1/sqrt(K) even when its updates are pure noise, and would never reach 0.0001.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.updates import Memory, Updates

ALPHA = 0.99
"""Weight of the past in a run's moving averages."""


@dataclass(frozen=True)
class Apf:
    """Finds the stable units at each check.

    Args:
        threshold: T_APF; a unit is stable if its score is below it.
        periods: true for APF alone, false for the hybrids. APF alone does not train frozen units, so a unit needs one
            interval of training before its score means anything. A stable unit is frozen for one check longer than the
            last time. The period of a unit that is unstable again is halved. In the hybrids every unit goes on
            learning, and each check decides anew.
        alpha: weight of the past in the moving averages, in [0, 1).
    """

    threshold: float
    periods: bool
    alpha: float = ALPHA

    def check(self, memory: Memory, updates: Updates) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the memory for the next check, and the stable units as bools ``[units]``."""
        period, waiting = (_remembered(memory, name, updates.units).astype(np.int64) for name in ("period", "waiting"))
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
        """Return E_K and E_K^abs, ``[units]``. They stay the same for units that did not train."""
        trend, size = (_remembered(memory, name, updates.units) for name in ("trend", "size"))
        rest = 1.0 - self.alpha
        return (
            np.where(trained, self.alpha * trend + rest * updates.mean, trend),
            np.where(trained, self.alpha * size + rest * updates.mean_abs, size),
        )

    def scores(self, trend: np.ndarray, size: np.ndarray, updates: Updates) -> np.ndarray:
        """Return the effective perturbation of each unit, in [0, 1].

        It is 0 for a unit that has never moved. It is NaN, so that the unit is never stable, where values are not
        finite or where no element was read.
        """
        strength = np.abs(trend)
        with np.errstate(invalid="ignore"):
            scores: np.ndarray = np.divide(strength, size, out=np.zeros_like(strength), where=size != 0.0)
        return np.where(updates.numel > 0, np.minimum(1.0, scores), np.nan)


def _remembered(memory: Memory, name: str, length: int) -> np.ndarray:
    """Return the remembered array, or zeros if it is absent or of another length, as version 2 may have saved it."""
    found = memory.get(name)
    return found if found is not None and len(found) == length else np.zeros(length)
