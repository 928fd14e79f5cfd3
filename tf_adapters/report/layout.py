"""Where each action of a batch lies in time and on which rank, before and after: what pictures are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tf_adapters.dag import PipelineDag
from tf_adapters.errors import ConfigError
from tf_adapters.ir import Action, PipelineSchedule
from tf_adapters.report.schema import Report

__all__ = ["Block", "Panel", "after", "before"]


@dataclass(frozen=True, slots=True)
class Block:
    """One action on the chart: pipeline rank ``row``, the rank's ``lane``-th stage, from and to in ms."""

    action: Action
    row: int
    lane: int
    start_ms: float
    end_ms: float
    frozen: float
    critical: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """The blocks of one batch, rank after rank, and the batch's end in ms."""

    title: str
    blocks: tuple[Block, ...]
    end_ms: float


def before(report: Report) -> Panel:
    """The batch with nothing frozen: each action takes its upper bound and starts as early as it can.

    Raises ConfigError when the report has no times yet, or none for an action.
    """
    if not report.times:
        raise ConfigError(f"nothing to draw yet: no action has been timed (status {report.status!r})")
    schedule = report.schedule.parse()
    try:
        upper = {action: report.times[str(action)][1] for action in schedule.actions}
    except KeyError as error:
        raise ConfigError(f"times has no entry for {error.args[0]}") from None
    dag = PipelineDag.from_schedule(schedule, _communication(report))
    path = set(dag.critical_path(upper))
    return _panel("before: nothing frozen", schedule, dag.start_times(upper), upper, {}, path, dag.makespan(upper))


def after(report: Report) -> Panel | None:
    """The batch as planned, or None without a plan. Raises ConfigError when the plan lacks an action."""
    plan = report.plan
    if plan is None:
        return None
    schedule = report.schedule.parse()
    for name, given in (("start_ms", plan.start_ms), ("duration_ms", plan.duration_ms)):
        missing = next((action for action in schedule.actions if action not in given), None)
        if missing is not None:
            raise ConfigError(f"plan.{name} has no entry for {missing}")
    title = f"after: planned, {plan.mean_freeze_ratio:.0%} of the weight gradients skipped"
    return _panel(
        title,
        schedule,
        plan.start_ms,
        plan.duration_ms,
        plan.freeze_ratio,
        set(plan.critical_path),
        plan.makespan_ms.planned,
    )


def _communication(report: Report) -> dict[tuple[Action, Action], float]:
    edges = {}
    for text, delay in report.communication.items():
        source, _, target = text.partition("->")
        edges[Action.parse(source), Action.parse(target)] = delay
    return edges


def _panel(
    title: str,
    schedule: PipelineSchedule,
    start: Mapping[Action, float],
    duration: Mapping[Action, float],
    frozen: Mapping[Action, float],
    critical: set[Action],
    end_ms: float,
) -> Panel:
    blocks = []
    for row, actions in enumerate(schedule.ranks):
        lanes = {stage: lane for lane, stage in enumerate(schedule.stages_of(row))}
        for action in actions:
            begin = start[action]
            share, on_path = frozen.get(action, 0.0), action in critical
            blocks.append(Block(action, row, lanes[action.stage], begin, begin + duration[action], share, on_path))
    return Panel(title, tuple(blocks), end_ms)
