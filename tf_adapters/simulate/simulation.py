"""The gain of freezing on a pipeline, as data for tables, JSON, pictures and traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tf_adapters.measuring.estimates import grouped
from tf_adapters.planner.forecast import planned_dag, stable_durations
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.program import Progress
from tf_adapters.planner.solve import solve
from tf_adapters.report.layout import Panel, timeline
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.simulate.simulated_pipeline import Pipeline

_EXACT = "exact: weight gradients deferred, nothing frozen"
_TOLERANCE = 1e-9  # of the makespan: slack below it is rounding
_AT_ONCE = 32  # ranks; bounds the memory


@dataclass(frozen=True, slots=True)
class Gain:
    """A batch in ms and its gain in throughput over the batch with nothing frozen: 0.25 is a quarter more.

    ``stable_ms`` and ``stable_gain`` are the forecast of ``planner.forecast`` for stable freezing: there stage 0's
    backward takes no time if all of it is frozen. The planner's straight line ignores that.
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


Placement = Literal["host", "v"]


@dataclass(frozen=True, slots=True)
class GoalPoint:
    """The plan of a goal, with ``extra_microbatches`` more in memory than the host holds.

    With ``placement`` "v" each rank has two stages, as in the setting of that name.
    ``held`` is the largest number of microbatches in a rank's memory, each of all the rank's layers.
    ``mean_freeze_ratio`` in [0, 1] is the share of weight gradients that is skipped, or of their time that is saved.
    """

    goal: str
    extra_microbatches: int
    placement: Placement
    batch: Gain
    held: float
    mean_freeze_ratio: float


@dataclass(frozen=True, slots=True)
class Holder:
    """The bottleneck rank of a batch, its stages, and the largest share in [0, 1] of a critical path that is on it."""

    rank: int
    stages: tuple[int, ...]
    share: float

    def __str__(self) -> str:
        if len(self.stages) == 1:
            return f"stage {self.stages[0]}"
        return f"rank {self.rank} (stages {', '.join(map(str, self.stages))})"


@dataclass(frozen=True)
class Simulation:
    """A pipeline with nothing frozen, as planned at ``max_freeze_ratio`` and with everything frozen.

    ``most`` is the gain with every weight gradient skipped; without deferral no r_max can beat it. ``holder`` is the
    bottleneck of that batch. ``exact`` is the batch with weight gradients deferred and nothing frozen, if any.
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
    goals: tuple[GoalPoint, ...] = ()

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Return the panels of a chart: before, with deferral alone, and after."""
        return (self.unfrozen, *([self.exact] if self.exact else []), self.planned)

    @property
    def exact_gain(self) -> float:
        """Return the gain in throughput from deferral alone, as a share."""
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
            "planned": {**_panel_json(self.planned), **asdict(self.gain)},
            "most": {**_panel_json(self.frozen), **asdict(self.most), "held_by": asdict(self.holder)},
            "sweep": [
                {"max_freeze_ratio": p.max_freeze_ratio, **asdict(p.batch), "mean_freeze_ratio": p.mean_freeze_ratio}
                for p in self.sweep
            ],
            "goals": [asdict(point) for point in self.goals],
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

    With ``extra_microbatches`` weight gradients may be deferred, and a rank may hold that many microbatches more than
    the fullest rank of the schedule; below 0, so many fewer. ``progress`` gets lines of text. Raises PlanInputError,
    ScheduleError and SolverError as ``tf_adapters.planner.plan`` does.
    """
    asked = dict.fromkeys((max_freeze_ratio, *sweep, *([] if extra_microbatches is None else [0.0])))
    solved = {ratio: _plan(pipeline, ratio, progress, extra_microbatches) for ratio in asked}
    chosen = solved[max_freeze_ratio]
    skipped = f"{chosen.mean_freeze_ratio:.0%} of the weight gradients skipped"
    title = f"planned at r_max {max_freeze_ratio:g}, {skipped}"
    known = pipeline.measurement
    schedule, dag = known.schedule, known.dag
    lower = {action: bounds.lower if action.freezable else bounds.upper for action, bounds in known.times.items()}
    everything = {action: 1.0 for action in schedule.actions if action.freezable}

    def of_plan(title: str, plan: FreezePlan) -> Panel:
        order, graph = plan.schedule or schedule, planned_dag(known, plan)
        return timeline(title, order, graph, durations=plan.duration_ms, frozen=plan.freeze_ratio)

    unfrozen = timeline("nothing frozen", schedule, dag, known.upper)
    frozen = timeline("everything frozen", schedule, dag, durations=lower, frozen=everything)
    gains = {
        ratio: gain_of(planned_dag(known, plan), unfrozen.end_ms, plan.duration_ms, plan.freeze_ratio)
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
        most=gain_of(dag, unfrozen.end_ms, lower, everything),
        holder=held_by(schedule, dag, lower),
        sweep=tuple(SweepPoint(ratio, gains[ratio], solved[ratio].mean_freeze_ratio) for ratio in sweep),
    )


def _plan(pipeline: Pipeline, ratio: float, progress: Progress | None, extra_microbatches: int | None) -> FreezePlan:
    deferral = {"defer": extra_microbatches is not None, "extra_microbatches": extra_microbatches or 0}
    problem = PlanProblem(pipeline.measurement, Limits.of_training(ratio, **deferral))
    tell = progress and (lambda text: progress(f"{pipeline.name} at r_max {ratio:g}: {text}"))
    return solve(problem, progress=tell)


def gain_of(
    dag: PipelineDag, unfrozen_ms: float, durations: Mapping[Action, float], ratios: Mapping[Action, float]
) -> Gain:
    """Return the span of a graph with these durations, in ms, and its gain over ``unfrozen_ms``."""
    ms, stable_ms = dag.span_ms(durations), dag.span_ms(stable_durations(durations, ratios))
    return Gain(ms, _over(unfrozen_ms, ms), stable_ms, _over(unfrozen_ms, stable_ms))


def _over(before: float, after: float) -> float:
    return before / after - 1.0 if after > 0.0 else 0.0


def _panel_json(panel: Panel) -> dict[str, Any]:
    return {
        "ms": panel.end_ms,
        "bubble": panel.bubble,
        "rank_busy_ms": list(panel.busy_ms),
        "rank_bubble": list(panel.bubbles),
        "critical_path": [str(action) for action in panel.critical_path],
    }


# --- the bottleneck --------------------------------------------------------------------------------------------


def held_by(schedule: PipelineSchedule, dag: PipelineDag, durations: Mapping[Action, float]) -> Holder:
    """Return the bottleneck rank of the batch in which actions take ``durations``, in ms.

    A batch usually has many critical paths, which change between equally busy ranks. The bottleneck is the rank on
    which some critical path spends the most time.
    """
    if len(dag.loops.sources):
        return _held_period(schedule, dag, durations)
    rank_of = np.array([schedule.home[action.stage] for action in dag.actions], dtype=np.int64)
    length = dag.durations(durations)
    busy = np.bincount(rank_of, weights=length, minlength=len(schedule.ranks))
    busiest = np.argsort(-busy, kind="stable")
    rank, most = int(busiest[0]), 0.0
    for first in range(0, len(busiest), _AT_ONCE):
        asked = busiest[first : first + _AT_ONCE]
        if busy[asked[0]] <= most:
            break  # no path is on a rank for longer than the rank is busy
        on_rank = _longest_on(asked.tolist(), dag, length, rank_of)
        best = int(np.argmax(on_rank))
        if on_rank[best] > most:
            rank, most = int(asked[best]), float(on_rank[best])
    end = dag.span(length)
    return Holder(rank, schedule.stages_of(rank), most / end if end > 0.0 else 0.0)


def _held_period(schedule: PipelineSchedule, dag: PipelineDag, durations: Mapping[Action, float]) -> Holder:
    """Return the bottleneck of the period: the rank on which a critical cycle spends the most time."""
    on_cycle = grouped((schedule.home[a.stage], durations[a]) for a in dag.critical_path(durations))
    of_rank = {rank: sum(values) for rank, values in sorted(on_cycle.items())}
    rank, most = max(of_rank.items(), key=lambda item: item[1])
    total = sum(of_rank.values())
    return Holder(rank, schedule.stages_of(rank), most / total if total > 0.0 else 0.0)


def _longest_on(
    ranks: Sequence[int], dag: PipelineDag, length: NDArray[np.float64], rank_of: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return, for each of ``ranks``, the most ms that any critical path spends on it."""
    starts = dag.earliest_starts(length)
    finish = starts + length
    end = float(finish.max(initial=0.0))
    slack = end * _TOLERANCE
    own = np.where(rank_of[:, None] == np.array(ranks)[None, :], length[:, None], 0.0)
    # Values of the critical chains that end with an action. Edges come by target in topological order, so values of a
    # source are final.
    before = np.zeros_like(own)
    for source, target, delay in zip(*(column.tolist() for column in dag.edges), strict=True):
        if finish[source] + delay >= starts[target] - slack:
            np.maximum(before[target], before[source] + own[source], out=before[target])
    longest: NDArray[np.float64] = (before + own)[finish >= end - slack].max(axis=0)
    return longest
