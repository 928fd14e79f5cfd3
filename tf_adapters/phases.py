"""Which phase a training step is in, and the actual freeze ratio of an action at that step.

Steps count from 1, as in the paper: step t is the t-th optimizer step since freezing was attached.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DEFAULT_WARMUP_STEPS = 10  # enough for kernels and allocators to settle where no scheduler names a warm-up


class Phase(str, Enum):
    """The phases of paper section 3, monitoring split into its two halves."""

    WARMUP = "warmup"
    MONITORING_UPPER = "monitoring_upper"
    MONITORING_LOWER = "monitoring_lower"
    PROGRESSIVE = "progressive"
    STABLE = "stable"

    @property
    def monitors(self) -> bool:
        return self in (Phase.MONITORING_UPPER, Phase.MONITORING_LOWER)

    @property
    def description(self) -> str:
        return _TITLES[self]


_TITLES = {
    Phase.WARMUP: "warm-up",
    Phase.MONITORING_UPPER: "monitoring, nothing frozen",
    Phase.MONITORING_LOWER: "monitoring, weight gradients frozen",
    Phase.PROGRESSIVE: "progressive freezing",
    Phase.STABLE: "stable freezing",
}


@dataclass(frozen=True, slots=True)
class PhaseSchedule:
    """The last step of each phase: T_w, T_m and T_f of the paper (section 3, "Notation")."""

    warmup_end: int
    monitoring_end: int
    progressive_end: int

    @classmethod
    def of_lengths(cls, warmup: int, monitoring: int, progressive: int, start: int = 0) -> PhaseSchedule:
        """Phases of the given lengths in steps, the first one beginning after step ``start``."""
        warmup_end = start + warmup
        return cls(warmup_end, warmup_end + monitoring, warmup_end + monitoring + progressive)

    @property
    def upper_end(self) -> int:
        """The last step of upper-bound monitoring: T_w + (T_m - T_w) / 2."""
        return self.warmup_end + (self.monitoring_end - self.warmup_end) // 2

    @property
    def monitoring_steps(self) -> int:
        return self.monitoring_end - self.warmup_end

    def phase(self, step: int) -> Phase:
        """The phase of step ``step`` (from 1)."""
        if step <= self.warmup_end:
            return Phase.WARMUP
        if step <= self.upper_end:
            return Phase.MONITORING_UPPER
        if step <= self.monitoring_end:
            return Phase.MONITORING_LOWER
        if step <= self.progressive_end:
            return Phase.PROGRESSIVE
        return Phase.STABLE

    def ramp(self, step: int) -> float:
        """Share of the planned ratio in force at ``step``, in [0, 1]; 0 before freezing.

        ``AFR = ratio * ramp``: the paper's actual freeze ratio, section 3.3.
        """
        if step <= self.monitoring_end:
            return 0.0
        length = self.progressive_end - self.monitoring_end
        return 1.0 if length == 0 else min(1.0, (step - self.monitoring_end) / length)
