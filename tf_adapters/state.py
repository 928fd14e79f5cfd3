"""Where a run is, what it has planned, and how that survives a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.ir import Action, PipelineSchedule
from tf_adapters.masks import StageMasks
from tf_adapters.phases import PhaseSchedule
from tf_adapters.planner import Bounds, FreezePlan

FORMAT = 1


@dataclass
class RunState:
    """The state of one run, equal on every rank."""

    phases: PhaseSchedule
    completed_steps: int = 0
    plan: FreezePlan | None = None
    bounds: dict[Action, Bounds] = field(default_factory=dict)
    unfrozen_step_ms: float = 0.0
    notes: tuple[str, ...] = ()
    failure: str | None = None

    @classmethod
    def fresh(cls, config: TimelyFreezeConfig, auto_warmup: int) -> RunState:
        warmup = auto_warmup if config.warmup_steps == "auto" else config.warmup_steps
        return cls(PhaseSchedule.of_lengths(warmup, config.monitoring_steps, config.progressive_steps))

    def restarted(self, config: TimelyFreezeConfig, reason: str) -> RunState:
        """The same step, with monitoring still to come (or still the warm-up, where that is not over)."""
        start = max(self.completed_steps, self.phases.warmup_end)
        phases = PhaseSchedule.of_lengths(0, config.monitoring_steps, config.progressive_steps, start)
        note = f"monitoring began again after step {start}: {reason}"
        return RunState(phases, self.completed_steps, notes=(*self.notes, note))

    def adopt(
        self,
        plan: FreezePlan,
        bounds: Mapping[Action, Bounds],
        unfrozen_step_ms: float,
        notes: tuple[str, ...],
    ) -> None:
        """Take a new plan into force, with what it was made from."""
        self.plan, self.bounds, self.unfrozen_step_ms = plan, dict(bounds), unfrozen_step_ms
        self.notes = (*self.notes, *notes)

    def to_json(self, config: TimelyFreezeConfig, schedule: PipelineSchedule, masks: StageMasks) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "fingerprint": fingerprint(config, schedule, masks),
            "completed_steps": self.completed_steps,
            "phases": [self.phases.warmup_end, self.phases.monitoring_end, self.phases.progressive_end],
            "plan": self.plan.to_json() if self.plan else None,
            "bounds": {str(action): [b.lower, b.upper] for action, b in self.bounds.items()},
            "unfrozen_step_ms": self.unfrozen_step_ms,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunState:
        return cls(
            phases=PhaseSchedule(*data["phases"]),
            completed_steps=data["completed_steps"],
            plan=FreezePlan.from_json(data["plan"]) if data["plan"] else None,
            bounds={Action.parse(text): Bounds(*pair) for text, pair in data["bounds"].items()},
            unfrozen_step_ms=data["unfrozen_step_ms"],
            notes=tuple(data["notes"]),
        )


def compatible_state(
    data: Mapping[str, Any] | None,
    config: TimelyFreezeConfig,
    schedule: PipelineSchedule,
    masks: StageMasks,
    auto_warmup: int,
) -> RunState:
    """The state to go on with: the saved one, or as much of it as still holds.

    Monitoring that a checkpoint interrupted starts over, for its times may come from another machine. A plan for
    another pipeline, other parameters or another budget is dropped and made anew; the step count stays.
    """
    if data is None:
        return RunState.fresh(config, auto_warmup)
    if data.get("format") != FORMAT:
        return RunState.fresh(config, auto_warmup)
    state = RunState.from_json(data)
    if data["fingerprint"] != fingerprint(config, schedule, masks):
        return state.restarted(config, "the checkpoint's plan is for another pipeline, model or budget")
    if state.plan is None and state.completed_steps > state.phases.warmup_end:
        return state.restarted(config, "a checkpoint interrupted it")
    return state


def fingerprint(config: TimelyFreezeConfig, schedule: PipelineSchedule, masks: StageMasks) -> str:
    """What a plan depends on besides the measured times."""
    parts = {
        "ranks": schedule.to_text(),
        "units": {stage: masks.names(stage) for stage in masks.stages},
        "max_freeze_ratio": config.max_freeze_ratio,
        "method": config.method,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
