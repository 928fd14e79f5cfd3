"""The phases of a run. Measurements are grouped by phase."""

from __future__ import annotations

from enum import Enum

LAYER_STEPS = 4
"""Number of steps in which layers are timed. They are the last of the warm-up, and no plan is made from them."""


class Phase(str, Enum):
    """The phases of paper section 3. Monitoring has two kinds of steps.

    ``CONTROL`` is no phase of the paper. It marks steps of stable training that run in the host's way.
    """

    WARMUP = "warmup"
    MONITORING_UPPER = "monitoring_upper"
    MONITORING_LOWER = "monitoring_lower"
    MONITORING_MIXED = "monitoring_mixed"
    PLANNING = "planning"
    PROGRESSIVE = "progressive"
    STABLE = "stable"
    CONTROL = "control"

    @property
    def monitors(self) -> bool:
        return self in (Phase.MONITORING_UPPER, Phase.MONITORING_LOWER, Phase.MONITORING_MIXED)
