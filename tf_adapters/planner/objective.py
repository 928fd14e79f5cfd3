"""What the interior point method makes least: the batch's end, and what freezing costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tf_adapters.planner.program import Corners, Floats, FreezeProgram

__all__ = ["Objective"]

_BY_RATIO: Corners = ((0.0, 0.0), (1.0, 1.0))


@dataclass(frozen=True, eq=False)
class Objective:
    """``end`` for each unit of time that the batch takes, and what each ratio costs: convex, smooth.

    The slope of that cost is the program's in the ``middles`` of its pieces and goes straight from one to the next.

    Attributes:
        actions: of the DAG; x is their start times, the batch's end and the ratios.
        slopes: in the middles.
    """

    actions: int
    end: float
    middles: Floats
    slopes: Floats

    @classmethod
    def of(cls, program: FreezeProgram, end: float, price: float) -> Objective:
        """``price`` is what a ratio costs on average, for each 1 of it, up to the largest."""
        ratios, prices = np.array(program.price or _BY_RATIO).T
        scale = price * ratios[-1] / (prices[-1] or 1.0)
        return cls(
            actions=len(program.upper),
            end=end,
            middles=0.5 * (ratios[1:] + ratios[:-1]),
            slopes=scale * np.diff(prices) / np.diff(ratios),
        )

    @property
    def is_curved(self) -> bool:
        return len(self.slopes) > 1

    def gradient(self, x: Floats) -> Floats:
        gradient = np.zeros_like(x)
        gradient[self.actions] = self.end
        gradient[self.actions + 1 :] = np.interp(x[self.actions + 1 :], self.middles, self.slopes)
        return gradient

    def curvature(self, x: Floats) -> Floats:
        """Of the ratios' cost; at least 0."""
        bends = np.concatenate([[0.0], np.diff(self.slopes) / np.diff(self.middles), [0.0]])
        return np.asarray(bends[np.searchsorted(self.middles, x[self.actions + 1 :])])
