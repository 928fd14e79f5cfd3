"""Plan again when actions no longer take as long as the plan says: a slower node, other sequence lengths, a curriculum.

Stable freezing is timed, and every ``replan_interval`` steps the times are compared with the plan's. The
saving of freezing is in proportion to an action's time, so the new bounds are the old ones times the change. Nothing is
monitored again, and until the new plan is there the old one is in force.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tf_adapters.collectives import decide_from_all
from tf_adapters.measuring.compact import PackedTraces
from tf_adapters.measuring.estimates import median, merged
from tf_adapters.measuring.freeze_response import Group
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.timer import ActionTimer, Sample, Trace
from tf_adapters.measuring.transfers import Gaps, complete_steps, local_traces, measure_gaps
from tf_adapters.planner.forecast import durations_under, planned_dag, stable_durations
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.schedule.deferral import backward_of
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.training import log_lines
from tf_adapters.training.plan_maker import Packed, PlanJob, RunSetup, packed, unpacked

_NEWEST = 64
"""Samples of an action that are looked at, at most."""

_IN_A_ROW = 2
"""Looks in a row that must find a change: one may see a short disturbance."""


@dataclass(frozen=True)
class _Local:
    """One rank's part: how many times as long each group takes as planned, its step in ms, its traces."""

    changes: Mapping[Group, float]
    step_ms: float
    traces: PackedTraces


class Replanning:
    """Finds out where plans no longer hold. Every method is called on all ranks at the same point."""

    def __init__(self, run: RunSetup) -> None:
        self._run, self._config = run, run.config
        self._changes_in_a_row = 0  # looks that found a change

    def due(self, step: int, settled: int) -> bool:
        """Return whether to look after ``step``. Stable freezing began after step ``settled``."""
        passed = step - settled
        return self._config.replan_threshold > 0 and passed > 0 and passed % self._config.replan_interval == 0

    def forget(self) -> None:
        """Begin anew: the pipeline runs something else now."""
        self._changes_in_a_row = 0

    def look(self, known: Measurement, plan: FreezePlan) -> PlanJob | None:
        """The plan to make anew; None where the old one holds. Raises TimelyFreezeError, the same on every rank."""
        schedule = known.schedule
        ran = plan.schedule or schedule

        def judge(ranks: Sequence[_Local]) -> tuple[Packed, str] | None:
            slowest = merged((rank.changes for rank in ranks), max)  # a stage takes as long as its slowest replica
            away = max((max(factor, 1.0 / factor) - 1.0 for factor in slowest.values()), default=0.0)
            if away <= self._config.replan_threshold:
                return None
            gaps = _gaps(known, plan, [rank.traces.unpack(ran) for rank in ranks])
            factors = {action: slowest.get((action.stage, action.kind), 1.0) for action in known.times}
            times = {a: Bounds(b.lower * factors[a], b.upper * factors[a]) for a, b in known.times.items()}
            now = replace(known, times=times, **gaps._asdict(), batch_times=None)
            saved = max(0.0, now.span_ms - self._planned_ms(now, plan))
            return packed(now.of_step(max(rank.step_ms for rank in ranks) + saved)), log_lines.changed(slowest)

        number = schedule.num_microbatches
        fresh = decide_from_all(self._run.collectives, lambda: self._local(ran, known.times, number), judge)
        self._changes_in_a_row = self._changes_in_a_row + 1 if fresh else 0
        if fresh is None or self._changes_in_a_row < _IN_A_ROW:
            return None
        self._changes_in_a_row = 0
        return PlanJob(unpacked(fresh[0], schedule), reason=fresh[1])

    def _local(self, ran: PipelineSchedule, bounds: Mapping[Action, Bounds], number: int) -> _Local:
        timer = self._run.timer
        timer.drain()
        traces = PackedTraces.of(ran, local_traces(timer, Phase.STABLE, number) if self._run.pipeline.traced else ())
        newest = min(self._config.replan_interval, _NEWEST)
        step_ms = timer.step_ms(Phase.STABLE, number) or 0.0
        return _Local(changes(timer, bounds, newest), step_ms, traces)

    def _planned_ms(self, known: Measurement, plan: FreezePlan) -> float:
        """A batch with these times under the plan in force, ms."""
        now = durations_under(plan, known.times)
        if self._run.masks.can_freeze_all(0):
            now = stable_durations(now, plan.freeze_ratio)
        return planned_dag(known, plan).span_ms(now)


def changes(timer: ActionTimer, bounds: Mapping[Action, Bounds], newest: int) -> dict[Group, float]:
    """Return measured over expected time of this rank's actions, in their ``newest`` stable samples, by group."""
    ratios: dict[Group, list[float]] = {}
    for action, bound in bounds.items():
        for sample in _stable_samples(timer, action)[-newest:]:
            expected = bound.upper - sample.share * (bound.upper - bound.lower)
            if expected > 0.0 and sample.share < 1.0 and sample.ms > 0.0:  # frozen whole, little or nothing is left
                ratios.setdefault((action.stage, action.kind), []).append(sample.ms / expected)
    return {group: median(of_group) or 1.0 for group, of_group in ratios.items()}


def _stable_samples(timer: ActionTimer, action: Action) -> Sequence[Sample]:
    """An action's samples; where weight gradients wait, a backward is both of its halves."""
    if action.kind is not Kind.BACKWARD:
        return timer.samples(Phase.STABLE, action)
    input_grads, weight_grads = (
        timer.samples(Phase.STABLE, replace(action, kind=kind)) for kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    )
    halves = [Sample(w.share, i.ms + w.ms) for i, w in zip(input_grads, weight_grads, strict=False)]
    return halves or timer.samples(Phase.STABLE, action)


def _gaps(known: Measurement, plan: FreezePlan, traces: Sequence[Sequence[tuple[int, Trace]]]) -> Gaps:
    """Return the gaps between the actions of the host's order, measured in steps that ran the plan's order.

    Steps in the plan's order do not show where sends in the host's order wait for their receivers.
    """
    ran, host = plan.schedule or known.schedule, frozenset(known.schedule.actions)
    steps = list(complete_steps(ran, traces).values())

    def in_host(action: Action) -> Action:
        return backward_of(action) if action.kind is Kind.INPUT_GRAD and action not in host else action

    if not steps:
        return known.gaps
    gaps = measure_gaps(ran, steps).renamed(in_host, host)
    return gaps if ran is known.schedule else gaps._replace(waits=known.waits)
