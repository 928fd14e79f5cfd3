"""Where a run is, what it has planned, and how that survives a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import TimelyFreezeError
from tf_adapters.planner.forecast import Forecast
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.learning import Learning
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.selection.masks import StageMasks
from tf_adapters.selection.stability import StabilityState
from tf_adapters.timing.token_cost import TokenCost
from tf_adapters.timing.transfers import NO_GAPS, Gaps
from tf_adapters.training.phases import PhaseSchedule
from tf_adapters.training.plan_maker import Measured, Planned

FORMAT = 2
_NOTES = 50  # the newest: a long run may begin or plan anew many times


@dataclass
class RunState:
    """The state of one run, equal on every rank."""

    phases: PhaseSchedule
    completed_steps: int = 0
    plan: FreezePlan | None = None
    bounds: dict[Action, Bounds] = field(default_factory=dict)
    gaps: Gaps = NO_GAPS
    unfrozen_step_ms: float = 0.0
    token_costs: Mapping[int, TokenCost] = field(default_factory=dict)
    learning: Learning | None = None
    planned_step_ms: float = 0.0
    notes: tuple[str, ...] = ()
    failure: str | None = None
    stability: StabilityState = field(default_factory=StabilityState)

    @classmethod
    def fresh(cls, config: TimelyFreezeConfig, auto_warmup: int) -> RunState:
        warmup = auto_warmup if config.warmup_steps == "auto" else config.warmup_steps
        notes = () if config.plans else (f"method {config.method} freezes what is stable: nothing is planned",)
        return cls(_phases(config, warmup), notes=notes)

    def restarted(self, config: TimelyFreezeConfig, reason: str) -> RunState:
        """The same step, with monitoring still to come (or still the warm-up, where that is not over)."""
        start = max(self.completed_steps, self.phases.warmup_end)
        phases = _phases(config, start)
        note = f"{'monitoring' if config.plans else 'freezing'} began again after step {start}: {reason}"
        return RunState(phases, self.completed_steps, notes=(*self.notes, note)[-_NOTES:])

    def measure(self, measured: Measured) -> None:
        """Keep what a plan is made from."""
        self.bounds, self.gaps, self.unfrozen_step_ms = dict(measured.bounds), measured.gaps, measured.unfrozen_step_ms
        self.token_costs, self.learning = measured.token_costs, measured.learning
        self.notes = (*self.notes, *measured.notes)[-_NOTES:]

    def adopt(self, planned: Planned) -> None:
        """Take a new plan into force."""
        self.plan, self.planned_step_ms = planned.plan, planned.step_ms
        self.notes = (*self.notes, *planned.notes)[-_NOTES:]

    def execution(self, host_order: PipelineSchedule, step: int) -> PipelineSchedule:
        """What the ranks run in ``step``: the order of a plan that defers, once one is in force; else the host's."""
        if self.plan is None or self.failure or step <= self.phases.freezing_start:
            return host_order
        rewritten = self.plan.schedule
        return host_order if rewritten is None or rewritten == host_order else rewritten

    @property
    def forecast(self) -> Forecast | None:
        """What the plan promises for a whole step; None before there is a plan."""
        return Forecast(self.unfrozen_step_ms, self.planned_step_ms) if self.plan else None

    @property
    def measured(self) -> Measured:
        """What the plan is made from, without the notes on it."""
        return Measured(
            self.bounds, self.gaps, self.unfrozen_step_ms, token_costs=self.token_costs, learning=self.learning
        )

    @property
    def awaits_plan(self) -> bool:
        """Whether everything is measured and only the plan is missing."""
        return self.plan is None and bool(self.bounds) and not self.failure

    def to_json(self, config: TimelyFreezeConfig, schedule: PipelineSchedule, masks: StageMasks) -> dict[str, Any]:
        data = {
            "format": FORMAT,
            "fingerprint": fingerprint(config, schedule, masks),
            "completed_steps": self.completed_steps,
            "phases": list(astuple(self.phases)),
            "plan": self.plan.to_json() if self.plan else None,
            "bounds": {str(action): [b.lower, b.upper] for action, b in self.bounds.items()},
            "gaps": self.gaps.to_json(),
            "unfrozen_step_ms": self.unfrozen_step_ms,
            "token_costs": {str(stage): cost.to_json() for stage, cost in self.token_costs.items()},
            "learning": self.learning.to_json() if self.learning else None,
            "planned_step_ms": self.planned_step_ms,
            "notes": list(self.notes),
            "stability": self.stability.to_json(),
        }
        return {**data, "checksum": _digest(data)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunState:
        return cls(
            phases=PhaseSchedule(*data["phases"]),
            completed_steps=data["completed_steps"],
            plan=FreezePlan.from_json(data["plan"]) if data["plan"] else None,
            bounds={Action.parse(text): Bounds(*pair) for text, pair in data["bounds"].items()},
            gaps=Gaps.from_json(data["gaps"]),
            unfrozen_step_ms=data["unfrozen_step_ms"],
            token_costs={int(stage): TokenCost(*pair) for stage, pair in data.get("token_costs", {}).items()},
            learning=Learning.from_json(data["learning"]) if data.get("learning") else None,
            planned_step_ms=data["planned_step_ms"],
            notes=tuple(data["notes"]),
            stability=StabilityState.from_json(data.get("stability")),
        )


def compatible_state(
    data: Mapping[str, Any] | None,
    config: TimelyFreezeConfig,
    schedule: PipelineSchedule,
    masks: StageMasks,
    auto_warmup: int,
) -> RunState:
    """The state to go on with: the saved one, or as much of it as still holds.

    Monitoring that a checkpoint interrupted starts over, for its times may come from another machine; a plan that was
    still being made is made again. A plan for another pipeline, other parameters or another budget is dropped and
    made anew; the step count stays.
    """
    if data is None:
        return RunState.fresh(config, auto_warmup)
    try:
        state = _read(data)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TimelyFreezeError) as error:
        fresh = RunState.fresh(config, auto_warmup)
        fresh.completed_steps = _step_count(data)
        return fresh.restarted(config, f"the checkpoint's state {' '.join(str(error).split())}")
    if data.get("fingerprint") != fingerprint(config, schedule, masks):
        return state.restarted(config, "the checkpoint's plan is for another pipeline, model or budget")
    unplanned = state.plan is None and not state.awaits_plan
    if config.plans and unplanned and state.completed_steps > state.phases.warmup_end:
        return state.restarted(config, "a checkpoint interrupted it")
    return state


def _read(data: Any) -> RunState:
    """Raises almost anything for what is no state, or is another than was saved."""
    if not isinstance(data, Mapping):
        raise ValueError(f"is no object: {data!r:.40}")
    if data.get("format") != FORMAT:
        raise ValueError(f"is of format {data.get('format')!r}, this version reads {FORMAT}")
    content = {key: value for key, value in data.items() if key != "checksum"}
    if "checksum" in data and data["checksum"] != _digest(content):
        raise ValueError("was changed after it was saved")
    try:
        return RunState.from_json(data)
    except KeyError as error:
        raise ValueError(f"lacks {error}") from None


def _step_count(data: Any) -> int:
    count = data.get("completed_steps") if isinstance(data, Mapping) else None
    return count if isinstance(count, int) and count >= 0 else 0


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _phases(config: TimelyFreezeConfig, warmup_end: int) -> PhaseSchedule:
    """Phases after a warm-up that ends with step ``warmup_end``: without a plan neither monitoring nor a ramp."""
    if not config.plans:
        return PhaseSchedule.of_lengths(warmup_end, 0, 0)
    mixed = config.monitoring == "mixed"
    return PhaseSchedule.of_lengths(warmup_end, config.monitoring_steps, config.progressive_steps, mixed=mixed)


def fingerprint(config: TimelyFreezeConfig, schedule: PipelineSchedule, masks: StageMasks) -> str:
    """What a plan depends on besides the measured times."""
    parts: dict[str, Any] = {
        "ranks": schedule.to_text(),
        "units": {stage: masks.names(stage) for stage in masks.stages},
        "max_freeze_ratio": config.max_freeze_ratio,
        "method": config.method,
    }
    if config.freeze_limits:
        parts["freeze_limits"] = config.freeze_limits
    if config.target_speedup or config.target_step_time_ms:
        parts["target"] = [config.target_speedup, config.target_step_time_ms]
    if config.defers:
        parts["deferred"] = config.extra_microbatches
    if config.samples_tokens:
        parts["granularity"] = config.granularity
    return _digest(parts)
