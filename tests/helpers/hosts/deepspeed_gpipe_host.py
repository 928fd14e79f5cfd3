"""DeepSpeed's pipeline engine under our GPipe schedule, for the contract tests."""

from __future__ import annotations

from typing import Any

from hosts.deepspeed_host import DeepSpeedTraining, forget

__all__ = ["build", "forget", "start"]


class GPipeTraining(DeepSpeedTraining):
    def attach(self, settings: dict[str, Any] | None = None) -> None:
        super().attach({**settings, "schedule": "gpipe"} if settings else None)


def start(settings: dict[str, Any] | None) -> GPipeTraining:
    """The host alone is a run of the same schedule that never freezes: DeepSpeed has no GPipe of its own."""
    if settings is None:
        settings = {"method": "none", "max_freeze_ratio": 0.0}
    return GPipeTraining({**settings, "schedule": "gpipe"})


build = GPipeTraining
