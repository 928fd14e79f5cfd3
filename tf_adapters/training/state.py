"""Where a run is, what it has planned, and how that survives a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import TimelyFreezeError
from tf_adapters.measuring.control_steps import is_control
from tf_adapters.measuring.measurement import NOTHING_MEASURED, Measurement
from tf_adapters.measuring.phase import Phase
from tf_adapters.planner.forecast import Forecast
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.schedule.deferral import holds_within, memory_limits
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.selection.masks import StageMasks
from tf_adapters.selection.stability import StabilityState, without_evidence
from tf_adapters.training.batches import BatchPlan, BatchPlans, carried_over, same_pipeline
from tf_adapters.training.phases import PhaseSchedule
from tf_adapters.training.plan_maker import Planned
from tf_adapters.training.tap_findings import TapFindings

FORMAT = 3
_NOTES = 50  # the newest: a long run may begin or plan anew many times


@dataclass
class RunState:
    """The state of one run, equal on all ranks. Only rank 0 has the values that stability checks compare with.

    ``schedule`` is the host's order of the batch that runs, or runs next. All ``plans`` are made from ``measurement``:
    the times of one number of microbatches, known after step ``measured_at``. In ``host_order_step`` the host runs its
    own order, whatever the plan says. ``control_step`` runs as the host alone would. If the run is
    ``left_to_host``, all steps do: planned ones were slower, or the plan moved forwards that must keep their order.
    ``taps`` is None until this process has checked them. ``undecided`` says that the last step is over, but ranks have
    not yet decided about the next one.
    """

    phases: PhaseSchedule
    completed_steps: int = 0
    schedule: PipelineSchedule = field(default=NOTHING_MEASURED.schedule, compare=False)
    plans: BatchPlans = field(default_factory=BatchPlans)
    measurement: Measurement = NOTHING_MEASURED
    measured_at: int = 0
    notes: tuple[str, ...] = ()
    failure: str | None = None
    stability: StabilityState = field(default_factory=StabilityState)
    host_order_step: int | None = field(default=None, compare=False)
    control_step: int | None = field(default=None, compare=False)
    left_to_host: bool = False
    taps: TapFindings | None = None
    undecided: bool = False

    @classmethod
    def fresh(cls, config: TimelyFreezeConfig, auto_warmup: int) -> RunState:
        warmup = auto_warmup if config.warmup_steps == "auto" else config.warmup_steps
        if config.splits_backwards:
            warmup = max(1, warmup)  # in the first step taps are checked: its times are not those of other steps
        notes = () if config.plans else (f"method {config.method} freezes what is stable: nothing is planned",)
        return cls(_phases(config, warmup), notes=notes)

    def restarted(self, config: TimelyFreezeConfig, reason: str) -> RunState:
        """The same step, with monitoring still to come (or still the warm-up, where that is not over)."""
        unchecked = config.splits_backwards and self.taps is None  # the next step checks the taps
        start = max(self.completed_steps + unchecked, self.phases.warmup_end)
        phases = _phases(config, start)
        note = f"{'monitoring' if config.plans else 'freezing'} began again after step {start}: {reason}"
        notes = (*self.notes, note)[-_NOTES:]
        return RunState(phases, self.completed_steps, self.schedule, notes=notes, taps=self.taps)

    def measure(self, known: Measurement, notes: tuple[str, ...] = ()) -> None:
        # A renewed measurement has no batch times: only steps that freeze nothing give them.
        batch_times = known.batch_times or self.measurement.batch_times
        self.measurement, self.measured_at = replace(known, batch_times=batch_times), self.completed_steps
        self.notes = (*self.notes, *notes)[-_NOTES:]

    def note(self, text: str) -> None:
        """Leave a line in the report's notes, once."""
        if text not in self.notes:
            self.notes = (*self.notes, text)[-_NOTES:]

    def adopt(self, schedule: PipelineSchedule, planned: Planned) -> None:
        """Take a new plan into force for batches that the host runs in the order of ``schedule``."""
        unfrozen_ms, now = self.measured_for(schedule).unfrozen_step_ms, self.completed_steps
        self.plans.put(BatchPlan(schedule, planned.plan, unfrozen_ms, planned.step_ms, planned_at=now))
        self.notes = (*self.notes, *planned.notes)[-_NOTES:]

    def turn_to(self, schedule: PipelineSchedule) -> None:
        """The next batches have another number of microbatches."""
        self.schedule = schedule
        if self.batch is not None and self.batch.schedule != schedule:
            del self.plans.of[self.microbatches]  # a checkpoint's, of another order

    @property
    def microbatches(self) -> int:
        return self.schedule.num_microbatches

    @property
    def batch(self) -> BatchPlan | None:
        """The plan that is in force for the batch that runs, or runs next."""
        return self.plans.of.get(self.microbatches)

    @property
    def plan(self) -> FreezePlan | None:
        """Return the plan of ``batch``; None before there is one for its number of microbatches."""
        return None if self.batch is None else self.batch.plan

    def execution(self, step: int) -> PipelineSchedule:
        """Return the order of ``step``: the host's, or once it is in force the order of a plan that defers."""
        if self.plan is None or self.failure or step <= self.phases.freezing_start:
            return self.schedule
        if step == self.host_order_step or self.runs_as_host(step):
            return self.schedule
        rewritten = self.plan.schedule
        return self.schedule if rewritten is None or rewritten == self.schedule else rewritten

    def begin_step(self, in_host_order: bool, may_control: bool) -> None:
        """Begin the next step. ``in_host_order`` asks for the host's order, ``may_control`` allows a control step."""
        step = self.completed_steps + 1
        self.host_order_step = step if in_host_order else None
        self.control_step = step if may_control and self.is_control(step) else None

    def runs_as_host(self, step: int) -> bool:
        """Return whether ``step`` runs as the host alone would."""
        return self.left_to_host or step == self.control_step

    def is_control(self, step: int) -> bool:
        """Return whether ``step`` is a control step: nothing is deferred or frozen. The plan must be fully in force.

        A host that splits backwards itself has none: where taps are at work, its own way of doing so cannot be taken
        in one step. Nor has a run whose memory the host's order exceeds.
        """
        stable = self.phases.phase(step) is Phase.STABLE and is_control(step - self.phases.progressive_end)
        if not stable or self.plan is None or self.failure or self.left_to_host:
            return False
        limits = memory_limits(self.schedule, 0, self.measurement.fitting_microbatches)
        if not holds_within(self.schedule, limits):
            return False
        return not self.schedule.splits_backwards and self.plan.changes(self.schedule)

    def freezes(self, config: TimelyFreezeConfig) -> bool:
        """Return whether the run freezes anything once it has been monitored."""
        return not self.failure and not self.left_to_host and config.freezes

    @property
    def forecast(self) -> Forecast | None:
        """Return the plan's promise for a whole step; None before there is a plan."""
        return None if self.batch is None else self.batch.forecast

    def measured_for(self, schedule: PipelineSchedule) -> Measurement:
        """Return the measurement for a schedule, perhaps with another number of microbatches."""
        return carried_over(self.measurement, schedule)

    def of_most_used(self) -> RunState:
        """Return a copy for the number of microbatches that most steps have had since the first plan.

        It lacks the values that stability checks compare with. Nothing that is done to it changes this state.
        """
        batch, known = self.plans.most_used, self.measurement
        if batch is not None:
            known = replace(self.measured_for(batch.schedule), unfrozen_step_ms=batch.unfrozen_step_ms)
        return replace(
            self,
            schedule=batch.schedule if batch else self.schedule,
            plans=BatchPlans(dict(self.plans.of)),
            measurement=known,
            stability=replace(self.stability, memory={}, snapshot=None),
        )

    @property
    def awaits_plan(self) -> bool:
        """Return whether everything is measured and only the first plan is missing."""
        return not self.plans and bool(self.measurement.times) and not self.failure

    def to_json(
        self, config: TimelyFreezeConfig, masks: StageMasks, host: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return plain JSON values. ``host`` has the facts of the host that a plan stands on, by name."""
        own = self.plans.of.get(self.measurement.schedule.num_microbatches)
        data = {
            "format": FORMAT,
            "fingerprint": fingerprint(config, own.schedule if own else self.schedule, masks),
            "host": dict(host or {}),
            "completed_steps": self.completed_steps,
            "phases": list(astuple(self.phases)),
            "measurement": self.measurement.to_json(),
            "measured_at": self.measured_at,
            "plans": [batch.to_json() for batch in self.plans.of.values()],
            "notes": list(self.notes),
            "stability": self.stability.to_json(),
            **{name: True for name in ("undecided", "left_to_host") if getattr(self, name)},
        }
        return {**data, "checksum": _digest(data)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], schedule: PipelineSchedule) -> RunState:
        """The inverse of ``to_json``; ``schedule`` is what the host runs next."""
        plans = [BatchPlan.from_json(batch) for batch in data["plans"]]
        return cls(
            phases=PhaseSchedule(*data["phases"]),
            completed_steps=data["completed_steps"],
            schedule=schedule,
            plans=BatchPlans({batch.schedule.num_microbatches: batch for batch in plans}),
            measurement=Measurement.from_json(data["measurement"]),
            measured_at=data["measured_at"],
            notes=tuple(data["notes"]),
            stability=StabilityState.from_json(data.get("stability")),
            undecided=data.get("undecided") is True,
            left_to_host=data.get("left_to_host") is True,
        )


def _of_format_2(data: Mapping[str, Any], schedule: PipelineSchedule) -> dict[str, Any]:
    """Format 2 had the measured facts in its own fields, and the plan of their number of microbatches, too.

    Its earliest versions had only that plan, which was made for ``schedule``.
    """
    alone = {"schedule": schedule.to_text(), "planned_at": 0, "plan": None}
    alone |= {name: data.get(name, 0.0) for name in ("unfrozen_step_ms", "planned_step_ms")}
    batches = data.get("batches", [alone] if data["plan"] else [])
    own = next((batch for batch in batches if batch["plan"] is None), alone)
    others = ("unfrozen_step_ms", "other_ms", "token_costs", "batch_times")
    facts = {name: data[name] for name in others if data.get(name) is not None}
    ranks = own["schedule"] if data["bounds"] else []
    measurement = Measurement.from_json({"ranks": ranks, "times": data["bounds"], **data["gaps"], **facts})
    if "other_ms" not in data:
        measurement = measurement.of_step(measurement.unfrozen_step_ms)
    plans = [{**batch, "plan": batch["plan"] or data["plan"]} for batch in batches]
    return {"measured_at": 0, **data, "measurement": measurement, "plans": plans}


def for_other_ranks(data: Any) -> Any:
    """Return the part of the first rank's saved state that decides whether and how other ranks go on with it.

    The values that stability checks compare with are left out. They are several MB in a large pipeline.
    """
    stability = data.get("stability") if isinstance(data, Mapping) else None
    if not isinstance(stability, Mapping) or not _is_intact(data):
        return data
    lean = {key: value for key, value in data.items() if key != "checksum"}
    lean["stability"] = without_evidence(stability)
    return {**lean, "checksum": _digest(lean)} if "checksum" in data else lean


def compatible_state(
    data: Mapping[str, Any] | None,
    config: TimelyFreezeConfig,
    schedule: PipelineSchedule,
    masks: StageMasks,
    auto_warmup: int,
    host: Mapping[str, Any] | None = None,
) -> RunState:
    """The state to go on with: the saved one, or as much of it as still holds.

    Monitoring that a checkpoint interrupted starts over, for its times may come from another machine; a plan that was
    still being made is made again. A plan for another pipeline, other parameters, another budget or other facts of the
    ``host`` is dropped and made anew; the step count stays. Facts that the checkpoint does not have count as equal.

    A plan that fills the memory is made anew in every run: what fits depends on the device, on the lengths of sequences
    and on what else the process holds, and none of these is known before steps have run.
    """
    fresh = RunState.fresh(config, auto_warmup)
    fresh.schedule = schedule
    if data is None:
        return fresh
    try:
        state = _read(data, schedule)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TimelyFreezeError) as error:
        fresh.completed_steps = _step_count(data)
        return fresh.restarted(config, f"the checkpoint's state {' '.join(str(error).split())}")
    measured_with = state.plans.of.get(state.measurement.schedule.num_microbatches)
    order = schedule if measured_with is None else measured_with.schedule
    if data.get("fingerprint") != fingerprint(config, order, masks) or not _fits(state, order, schedule):
        return state.restarted(config, "the checkpoint's plan is for another pipeline, model or budget")
    if changed := _changed_facts(data, host or {}):
        return state.restarted(config, f"the checkpoint's plan is for {changed}")
    if config.fills_memory and state.measurement.times:
        return state.restarted(config, "how many microbatches fit into memory is measured in every run")
    unplanned = not state.plans and not state.awaits_plan
    if config.plans and unplanned and state.completed_steps > state.phases.warmup_end:
        return state.restarted(config, "a checkpoint interrupted it")
    if config.plans and not config.freezes:  # in earlier versions every plan began with progressive freezing
        state.phases = state.phases.without_ramp()
    state.turn_to(schedule)
    return state


def _changed_facts(data: Mapping[str, Any], host: Mapping[str, Any]) -> str:
    """Return in words which facts of the host differ from the checkpoint's; an empty text if none do."""
    saved = data.get("host")
    before = saved if isinstance(saved, Mapping) else {}
    return ", ".join(
        f"{name} {before[name]!r}, not {value!r}" for name, value in host.items() if before.get(name, value) != value
    )


def _fits(state: RunState, order: PipelineSchedule, schedule: PipelineSchedule) -> bool:
    """Return whether plans for a host's ``order`` hold for its ``schedule``, perhaps of other batches."""
    own = state.plans.of.get(schedule.num_microbatches)
    return same_pipeline(order, schedule) and (own is None or own.schedule == schedule)


def _read(data: Any, schedule: PipelineSchedule) -> RunState:
    """Raises almost anything for what is no state, or is another than was saved."""
    if not isinstance(data, Mapping):
        raise ValueError(f"is no object: {data!r:.40}")
    if data.get("format") not in (2, FORMAT):
        raise ValueError(f"is of format {data.get('format')!r}, this version reads 2 and {FORMAT}")
    if not _is_intact(data):
        raise ValueError("was changed after it was saved")
    try:
        return RunState.from_json(data if data["format"] == FORMAT else _of_format_2(data, schedule), schedule)
    except KeyError as error:
        raise ValueError(f"lacks {error}") from None


def _is_intact(data: Mapping[str, Any]) -> bool:
    """Return whether a state is as it was saved. Early versions had no checksum, and their states count as intact."""
    if "checksum" not in data:
        return True
    content = {key: value for key, value in data.items() if key != "checksum"}
    try:
        return bool(data["checksum"] == _digest(content))
    except (RecursionError, TypeError, ValueError):  # values that JSON has not
        return False


def _step_count(data: Any) -> int:
    count = data.get("completed_steps") if isinstance(data, Mapping) else None
    return count if isinstance(count, int) and count >= 0 else 0


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _phases(config: TimelyFreezeConfig, warmup_end: int) -> PhaseSchedule:
    """Phases after a warm-up that ends with step ``warmup_end``. There is a ramp only if a plan may freeze."""
    if not config.plans:
        return PhaseSchedule.of_lengths(warmup_end, 0, 0)
    mixed = config.monitoring == "mixed"
    phases = PhaseSchedule.of_lengths(warmup_end, config.monitoring_steps, config.progressive_steps, mixed=mixed)
    return phases if config.freezes else phases.without_ramp()


def fingerprint(config: TimelyFreezeConfig, schedule: PipelineSchedule, masks: StageMasks) -> str:
    """Return a digest of all that a plan depends on besides the measured times."""
    parts: dict[str, Any] = {
        "ranks": schedule.to_text(),
        "units": {stage: masks.names(stage) for stage in masks.stages},
        "max_freeze_ratio": config.max_freeze_ratio,
        "method": config.method,
    }
    if config.freeze_limits:
        parts["freeze_limits"] = config.freeze_limits
    if config.target_speedup:
        parts["target"] = [config.target_speedup, None]  # as checkpoints of versions that also had a target in ms
    if config.defers:
        parts["deferred"] = config.extra_microbatches
    if config.fills_memory:
        parts["memory_limit"] = config.memory_limit
    if config.samples_tokens:
        parts["granularity"] = config.granularity
    return _digest(parts)
