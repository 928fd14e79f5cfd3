"""DeepSpeed's pipeline engine under our GPipe schedule, for the contract tests."""

from __future__ import annotations

from typing import Any

from hosts.deepspeed_host import DeepSpeedTraining

__all__ = ["start"]


def start(settings: dict[str, Any] | None) -> DeepSpeedTraining:
    """The host alone is a run of the same schedule that never freezes: DeepSpeed has no GPipe of its own."""
    if settings is None:
        settings = {"method": "none", "monitoring_masks": False}
    return DeepSpeedTraining({**settings, "schedule": "gpipe"})
