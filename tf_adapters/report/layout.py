"""Panels: the time and the rank of each action of a batch. Tables, pictures and traces are made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tf_adapters.errors import ConfigError
from tf_adapters.planner.forecast import durations_under, planned_dag
from tf_adapters.report.schema import BackwardSample, Report
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, PipelineSchedule


@dataclass(frozen=True, slots=True)
class Block:
    """One action on the chart, on pipeline rank ``row``; its stage is the rank's ``lane``-th."""

    action: Action
    row: int
    lane: int
    start_ms: float
    end_ms: float
    frozen: float
    critical: bool
    step: int = 0  # 1 in the second of two steps that overlap


@dataclass(frozen=True)
class Panel:
    """One batch: its blocks, rank after rank in execution order, its end in ms and its critical path, in order.

    Where steps overlap it shows two steps in a row, and ``end_ms`` is the period. ``stages`` holds the stages of each
    rank, ascending.
    """

    title: str
    stages: tuple[tuple[int, ...], ...]
    blocks: tuple[Block, ...]
    end_ms: float
    critical_path: tuple[Action, ...]

    @cached_property
    def rows(self) -> tuple[tuple[Block, ...], ...]:
        rows: list[list[Block]] = [[] for _ in self.stages]
        for block in self.blocks:
            rows[block.row].append(block)
        return tuple(map(tuple, rows))

    @cached_property
    def busy_ms(self) -> tuple[float, ...]:
        """Time in ms that each rank computes in one step."""
        return tuple(sum(block.end_ms - block.start_ms for block in row if block.step == 0) for row in self.rows)

    @cached_property
    def overlap(self) -> bool:
        """Return whether the panel shows two steps that overlap."""
        return any(block.step for block in self.blocks)

    @cached_property
    def drawn_ms(self) -> float:
        """The end of the last block that is shown, in ms."""
        return max((block.end_ms for block in self.blocks), default=0.0) if self.overlap else self.end_ms

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the batch, in [0, 1], that each rank waits."""
        return tuple(max(0.0, 1.0 - busy / self.end_ms) if self.end_ms > 0.0 else 0.0 for busy in self.busy_ms)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, in [0, 1], that they wait."""
        return sum(self.bubbles) / len(self.bubbles) if self.bubbles else 0.0


def before(report: Report) -> Panel:
    """The batch with nothing frozen, each action as early as it can start. Raises ConfigError without times."""
    known, what = report.measurement, "nothing frozen" if report.freezes else "the host's order"
    return timeline(f"before: {what}", known.schedule, known.dag, known.upper)


def exact(report: Report) -> Panel | None:
    """The batch with weight gradients deferred and nothing frozen; None where that is the plan, or no order of it."""
    plan, order = report.plan, planned_order(report)
    if plan is None or not report.has_own_order or not plan.mean_freeze_ratio:
        return None
    durations = durations_under(replace(plan, freeze_ratio={}), report.measurement.times)
    dag = planned_dag(report.measurement, plan)
    return timeline("exact: weight gradients deferred, nothing frozen", order, dag, durations)


def after(report: Report) -> Panel | None:
    """The batch as planned; None without a plan that changes it. Raises ConfigError when the plan lacks an action."""
    plan = report.plan
    if plan is None or not (plan.mean_freeze_ratio or report.has_own_order):
        return None
    schedule = planned_order(report)
    for name, given in (("start_ms", plan.start_ms), ("duration_ms", plan.duration_ms)):
        missing = next((action for action in schedule.actions if action not in given), None)
        if missing is not None:
            raise ConfigError(f"plan.{name} has no entry for {missing}")
    skipped = f"{plan.mean_freeze_ratio:.0%} of the weight gradients skipped"
    return _panel(
        f"after: planned, {skipped if plan.mean_freeze_ratio else 'weight gradients deferred'}",
        schedule,
        plan.start_ms,
        duration=plan.duration_ms,
        frozen=plan.freeze_ratio,
        path=plan.critical_path,
        span_ms=plan.span_ms.planned,
        overlap=plan.period_ms is not None,
    )


def measured(report: Report) -> Panel | None:
    """The batch in stable freezing, or None as long as a backward was not measured.

    A report holds medians of durations and no starts: the starts follow from the schedule's graph.
    Actions that freezing does not change keep the time that they had with nothing frozen.
    """
    samples = stable_samples(report)
    schedule, times = planned_order(report), report.times
    # Halves of a backward that the plan splits have no times from monitoring.
    changed = {action for action in schedule.actions if action.freezable or str(action) not in times}
    if not samples or any(str(action) not in samples for action in changed):
        return None
    durations = {
        action: samples[str(action)].ms if action in changed else times[str(action)][1] for action in schedule.actions
    }
    ratios = {action: samples[str(action)].afr for action in schedule.actions if action.freezable}
    mean = sum(ratios.values()) / len(ratios)
    what = f"stable freezing ({mean:.0%} skipped)" if mean else "stable steps"
    title = f"measured: medians of {what} put through the schedule's graph"
    return timeline(title, schedule, planned_dag(report.measurement, report.plan), durations=durations, frozen=ratios)


def stable_samples(report: Report) -> dict[str, BackwardSample]:
    """The sample of each action from stable freezing; empty before the stable phase.

    An old report does not name the phases of samples: there the sample nearest to the planned ratio counts.
    """
    if report.status != "stable":
        return {}
    named = [sample for sample in report.measured.backward_ms if sample.phase]
    if named:
        return {sample.action: sample for sample in named if sample.phase == "stable"}
    ratios = {str(action): ratio for action, ratio in report.plan.freeze_ratio.items()} if report.plan else {}
    # The last of equally near samples counts: a report lists the stable phase after the monitoring.
    farthest_first = sorted(report.measured.backward_ms, key=lambda of: -abs(of.afr - ratios.get(of.action, 1.0)))
    return {sample.action: sample for sample in farthest_first}


def planned_order(report: Report) -> PipelineSchedule:
    """Return the order under the plan: its own if weight gradients are deferred, else the host's."""
    return (report.plan.schedule if report.plan else None) or report.schedule


def panels_of(report: Report) -> tuple[Panel, ...]:
    """Return before, exact, after and measured, as far as the report has them. Raises ConfigError and ScheduleError."""
    made = (before(report), exact(report), after(report), measured(report))
    where = "emulated devices; " if report.host.emulated else ""
    return tuple(replace(panel, title=where + panel.title) for panel in made if panel is not None)


def timeline(
    title: str,
    schedule: PipelineSchedule,
    dag: PipelineDag,
    durations: Mapping[Action, float],
    frozen: Mapping[Action, float] | None = None,
) -> Panel:
    """The batch in which actions take ``durations`` (ms) and start as early as ``dag`` lets them.

    ``frozen`` holds the freeze ratios to show, 0 where absent.
    """
    return _panel(
        title,
        schedule,
        dag.start_times(durations),
        duration=durations,
        frozen=frozen or {},
        path=dag.critical_path(durations),
        span_ms=dag.span_ms(durations),
        overlap=len(dag.loops.sources) > 0,
    )


def _panel(
    title: str,
    schedule: PipelineSchedule,
    start: Mapping[Action, float],
    *,
    duration: Mapping[Action, float],
    frozen: Mapping[Action, float],
    path: tuple[Action, ...],
    span_ms: float,
    overlap: bool,
) -> Panel:
    """One batch, or two steps in a row where they overlap."""
    stages = tuple(schedule.stages_of(rank) for rank in range(len(schedule.ranks)))
    critical = set(path)
    blocks = [
        Block(
            action,
            row,
            lane=stages[row].index(action.stage),
            start_ms=start[action],
            end_ms=start[action] + duration[action],
            frozen=frozen.get(action, 0.0),
            critical=action in critical,
        )
        for row, actions in enumerate(schedule.ranks)
        for action in actions
    ]
    if overlap:
        blocks += [
            replace(b, start_ms=b.start_ms + span_ms, end_ms=b.end_ms + span_ms, critical=False, step=1) for b in blocks
        ]
        title = f"{title}; two steps"
    return Panel(title, stages, blocks=tuple(blocks), end_ms=span_ms, critical_path=path)
