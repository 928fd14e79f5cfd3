"""The phase of a training step, and the actual freeze ratio of an action at that step.

Steps count from 1, as in the paper: step t is the t-th optimizer step since freezing was attached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tf_adapters.measuring.phase import Phase

LEAST_MIXED_STEPS = 10  # five of each kind: an error cannot be estimated from fewer
DEFAULT_WARMUP_STEPS = 10  # enough for kernels and allocators to settle where no scheduler names a warm-up

_TITLES = {
    Phase.WARMUP: "warm-up",
    Phase.MONITORING_UPPER: "monitoring, nothing frozen",
    Phase.MONITORING_LOWER: "monitoring, weight gradients frozen",
    Phase.PLANNING: "the plan is being made",
    Phase.PROGRESSIVE: "progressive freezing",
    Phase.STABLE: "stable freezing",
}


@dataclass(frozen=True, slots=True)
class PhaseSchedule:
    """The last step of each phase: T_w, T_m and T_f of the paper (section 3, "Notation").

    ``plan_end`` is the last step of planning, where that takes longer than a step boundary; the paper's plan is
    there when step T_m ends, and freezing follows at once. ``mixed``: every second step of monitoring freezes.
    """

    warmup_end: int
    monitoring_end: int
    progressive_end: int
    plan_end: int | None = None
    mixed: bool = False

    @classmethod
    def of_lengths(cls, warmup: int, monitoring: int, progressive: int, mixed: bool = False) -> PhaseSchedule:
        return cls(warmup, warmup + monitoring, warmup + monitoring + progressive, mixed=mixed)

    @property
    def upper_end(self) -> int:
        """The last step of upper-bound monitoring: T_w + (T_m - T_w) / 2."""
        return self.warmup_end + (self.monitoring_end - self.warmup_end) // 2

    @property
    def freezing_start(self) -> int:
        return self.monitoring_end if self.plan_end is None else self.plan_end

    def mixed_turn(self, step: int) -> int:
        """Return the number of steps of mixed monitoring before ``step`` that drew freeze ratios."""
        return (step - self.warmup_end - 1) // 2

    def may_end_monitoring(self, step: int) -> bool:
        """Return whether mixed monitoring may end with ``step``: after enough pairs of steps to estimate an error."""
        done = step - self.warmup_end
        return self.mixed and self.phase(step).monitors and done >= LEAST_MIXED_STEPS and done % 2 == 0

    def monitored_until(self, step: int) -> PhaseSchedule:
        """The same with step ``step`` as the last one of monitoring; progressive freezing keeps its length."""
        length = self.progressive_end - self.monitoring_end
        return replace(self, monitoring_end=step, progressive_end=step + length)

    def planned_after(self, step: int) -> PhaseSchedule:
        """The same with step ``step`` as the last one of planning; progressive freezing keeps its length."""
        return replace(self, plan_end=step, progressive_end=step + self.progressive_end - self.freezing_start)

    def without_ramp(self) -> PhaseSchedule:
        """The same for a plan that freezes nothing: it is in force, complete, from its first step."""
        return replace(self, progressive_end=self.freezing_start)

    def phase(self, step: int) -> Phase:
        """The phase of step ``step`` (from 1)."""
        if step <= self.warmup_end:
            return Phase.WARMUP
        if step <= self.monitoring_end:
            return self._monitoring(step)
        if step <= self.freezing_start:
            return Phase.PLANNING
        if step <= self.progressive_end:
            return Phase.PROGRESSIVE
        return Phase.STABLE

    def _monitoring(self, step: int) -> Phase:
        if self.mixed:
            return Phase.MONITORING_UPPER if (step - self.warmup_end) % 2 else Phase.MONITORING_MIXED
        return Phase.MONITORING_UPPER if step <= self.upper_end else Phase.MONITORING_LOWER

    def description(self, step: int) -> str:
        """Return the name in the log of the phase of ``step``."""
        phase = self.phase(step)
        mixed = self.mixed and phase.monitors
        return "monitoring, every second step with drawn freeze ratios" if mixed else _TITLES[phase]

    def ramp(self, step: int) -> float:
        """Share of the planned ratio in force at ``step``, in [0, 1]; 0 before freezing.

        ``AFR = ratio * ramp``: the paper's actual freeze ratio, section 3.3.
        """
        if step <= self.freezing_start:
            return 0.0
        length = self.progressive_end - self.freezing_start
        return 1.0 if length == 0 else min(1.0, (step - self.freezing_start) / length)


def warmup_left(scheduler: Any, per_step: int = 1) -> int:
    """Return the rest of a learning-rate warm-up, in steps, or ``DEFAULT_WARMUP_STEPS`` if the scheduler has none.

    The scheduler is of Megatron's kind, and counts ``per_step`` samples in a step.
    """
    if scheduler.lr_warmup_steps <= 0:
        return DEFAULT_WARMUP_STEPS
    left: float = scheduler.lr_warmup_steps - scheduler.num_steps
    return max(0, math.ceil(left / per_step))
