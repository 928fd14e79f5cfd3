"""What freezing would bring to a pipeline, as data for tables, JSON, pictures and traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tf_adapters.planner.forecast import planned_dag, stable_durations
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import PlanProblem, most_of_a_microbatch
from tf_adapters.planner.program import Progress
from tf_adapters.planner.solve import solve
from tf_adapters.report.layout import Panel, timeline
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action
from tf_adapters.simulate.limit import Holder, held_by
from tf_adapters.simulate.pipeline import Pipeline

__all__ = ["Gain", "Simulation", "SweepPoint", "simulate"]


_EXACT = "exact: weight gradients deferred, nothing frozen"


@dataclass(frozen=True, slots=True)
class Gain:
    """A batch in ms and its gain in throughput over the batch with nothing frozen: 0.25 is a quarter more.

    ``stable_ms`` and ``stable_gain`` are those of stable freezing as ``planner.forecast`` expects it: stage 0's
    backward takes no time where all of it is frozen, which the planner's straight line does not count.
    """

    ms: float
    gain: float
    stable_ms: float
    stable_gain: float


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The plan at one r_max; ``mean_freeze_ratio`` in [0, 1] is over all backwards."""

    max_freeze_ratio: float
    batch: Gain
    mean_freeze_ratio: float


@dataclass(frozen=True)
class Simulation:
    """A pipeline with nothing frozen, as planned at ``max_freeze_ratio`` and with everything frozen.

    ``most`` has every weight gradient skipped, which no r_max can beat; ``holder`` is the bottleneck of that batch.
    ``exact`` is the batch with weight gradients deferred and nothing frozen, where they may wait.
    """

    pipeline: Pipeline
    max_freeze_ratio: float
    plan: FreezePlan
    unfrozen: Panel
    planned: Panel
    frozen: Panel
    gain: Gain
    most: Gain
    holder: Holder
    sweep: tuple[SweepPoint, ...]
    exact: Panel | None = None

    @property
    def panels(self) -> tuple[Panel, ...]:
        """What a chart shows: before and after, and between them what deferring alone brings."""
        return (self.unfrozen, *([self.exact] if self.exact else []), self.planned)

    @property
    def exact_gain(self) -> float:
        """What deferring alone brings in throughput, as a share."""
        return _over(self.unfrozen.end_ms, self.exact.end_ms) if self.exact else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: times in ms, ratios and shares in [0, 1], gains as shares (0.25: a quarter more)."""
        schedule = self.pipeline.schedule
        return {
            "name": self.pipeline.name,
            "ranks": len(schedule.ranks),
            "stages": schedule.num_stages,
            "microbatches": schedule.num_microbatches,
            "max_freeze_ratio": self.max_freeze_ratio,
            "unfrozen": _panel_json(self.unfrozen),
            **({"exact": {**_panel_json(self.exact), "gain": self.exact_gain}} if self.exact else {}),
            "planned": {**_panel_json(self.planned), **_gain_json(self.gain)},
            "most": {**_panel_json(self.frozen), **_gain_json(self.most), "held_by": asdict(self.holder)},
            "sweep": [
                {
                    "max_freeze_ratio": point.max_freeze_ratio,
                    "ms": point.batch.ms,
                    **_gain_json(point.batch),
                    "mean_freeze_ratio": point.mean_freeze_ratio,
                }
                for point in self.sweep
            ],
            "plan": self.plan.to_json(),
        }


def simulate(
    pipeline: Pipeline,
    max_freeze_ratio: float = 0.8,
    sweep: Sequence[float] = (),
    progress: Progress | None = None,
    extra_microbatches: int | None = None,
) -> Simulation:
    """Plan ``pipeline`` at ``max_freeze_ratio`` and at every ratio of ``sweep``, all in [0, 1].

    With ``extra_microbatches`` weight gradients may wait, and a rank may hold that many microbatches more than the
    fullest rank of the schedule.
    ``progress`` is told in words how far the plans have come. Raises PlanInputError, ScheduleError and SolverError as
    ``tf_adapters.planner.plan`` does.
    """
    asked = dict.fromkeys((max_freeze_ratio, *sweep, *([] if extra_microbatches is None else [0.0])))
    solved = {ratio: _plan(pipeline, ratio, progress, extra_microbatches) for ratio in asked}
    chosen = solved[max_freeze_ratio]
    skipped = f"{chosen.mean_freeze_ratio:.0%} of the weight gradients skipped"
    title = f"planned at r_max {max_freeze_ratio:g}, {skipped}"
    schedule, times = pipeline.schedule, pipeline.times
    dag = PipelineDag.from_schedule(schedule, *pipeline.gaps)
    upper = {action: bounds.upper for action, bounds in times.items()}
    lower = {action: bounds.lower if action.freezable else bounds.upper for action, bounds in times.items()}
    everything = {action: 1.0 for action in schedule.actions if action.freezable}

    def panel(title: str, durations: Mapping[Action, float], frozen: Mapping[Action, float] | None = None) -> Panel:
        return timeline(title, schedule, dag=dag, durations=durations, frozen=frozen)

    def of_plan(title: str, plan: FreezePlan) -> Panel:
        order, graph = plan.schedule or schedule, planned_dag(schedule, plan, pipeline.gaps)
        return timeline(title, order, graph, durations=plan.duration_ms, frozen=plan.freeze_ratio)

    unfrozen = panel("nothing frozen", upper)
    frozen = panel("everything frozen", lower, everything)
    gains = {
        ratio: _gain(planned_dag(schedule, plan, pipeline.gaps), unfrozen.end_ms, plan.duration_ms, plan.freeze_ratio)
        for ratio, plan in solved.items()
    }
    return Simulation(
        pipeline=pipeline,
        max_freeze_ratio=max_freeze_ratio,
        plan=chosen,
        unfrozen=unfrozen,
        exact=None if extra_microbatches is None else of_plan(_EXACT, solved[0.0]),
        planned=of_plan(title, chosen),
        frozen=frozen,
        gain=gains[max_freeze_ratio],
        most=_gain(dag, unfrozen.end_ms, lower, everything),
        holder=held_by(schedule, dag, lower),
        sweep=tuple(SweepPoint(ratio, gains[ratio], solved[ratio].mean_freeze_ratio) for ratio in sweep),
    )


def _plan(pipeline: Pipeline, ratio: float, progress: Progress | None, extra_microbatches: int | None) -> FreezePlan:
    problem = PlanProblem(
        schedule=pipeline.schedule,
        times=pipeline.times,
        max_freeze_ratio=ratio,
        **pipeline.gaps._asdict(),
        max_microbatch_freeze_ratio=most_of_a_microbatch(ratio),
        defer=extra_microbatches is not None,
        extra_microbatches=extra_microbatches or 0,
    )
    tell = progress and (lambda text: progress(f"{pipeline.name} at r_max {ratio:g}: {text}"))
    return solve(problem, progress=tell)


def _gain(
    dag: PipelineDag, unfrozen_ms: float, durations: Mapping[Action, float], ratios: Mapping[Action, float]
) -> Gain:
    ms, stable_ms = dag.makespan(durations), dag.makespan(stable_durations(durations, ratios))
    return Gain(ms, _over(unfrozen_ms, ms), stable_ms, _over(unfrozen_ms, stable_ms))


def _over(before: float, after: float) -> float:
    return before / after - 1.0 if after > 0.0 else 0.0


def _gain_json(gain: Gain) -> dict[str, float]:
    return {"gain": gain.gain, "stable_ms": gain.stable_ms, "stable_gain": gain.stable_gain}


def _panel_json(panel: Panel) -> dict[str, Any]:
    return {
        "ms": panel.end_ms,
        "bubble": panel.bubble,
        "rank_busy_ms": list(panel.busy_ms),
        "rank_bubble": list(panel.bubbles),
        "critical_path": [str(action) for action in panel.critical_path],
    }
