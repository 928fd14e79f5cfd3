"""A plan: what to freeze, and the batch that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from pydantic import Field

from tf_adapters.planner.program import SolverStatus
from tf_adapters.schedule.durations import ActionText, Milliseconds, Order, Quotient, Share
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.values import Value


@dataclass(frozen=True)
class Makespan:
    """How long a batch or a period takes in ms with nothing frozen, as planned, and with everything frozen.

    ``host`` is the time in the host's order with nothing frozen. Only plans in which weight gradients may wait have it.
    """

    unfrozen: Milliseconds
    planned: Milliseconds
    fully_frozen: Milliseconds
    host: Milliseconds | None = None


@dataclass(frozen=True)
class SolverReport:
    """The solver, its status, its wall time in s, and the plan's proven distance from the optimum.

    No freeze ratios within the budgets end the batch before (1 - optimality_gap) * planned makespan. Nothing is proven
    about ends before the target, because every end by the target is early enough.
    """

    name: str
    status: SolverStatus
    seconds: Milliseconds
    optimality_gap: Quotient


@dataclass(frozen=True)
class FreezePlan(Value):
    """The freeze ratios of a plan, and the batch that results. Times in ms from the batch's start, ratios in [0, 1].

    ``freeze_ratio`` has the actions that compute weight gradients (B and W), ``start_ms`` and
    ``duration_ms`` have every action. The means are over B and W actions, of all stages or of one. Where weight
    gradients may wait, ``schedule`` is the order to run and ``deferrable_share`` the share of a stage's backwards that
    can wait. Where steps overlap, ``period_ms`` is the time from a rank's first action to its first action in the next
    step, and ``makespan_ms`` is the time of a batch alone.
    """

    makespan_ms: Makespan
    freeze_ratio: Mapping[ActionText, Share]
    start_ms: Mapping[ActionText, Milliseconds]
    duration_ms: Mapping[ActionText, Milliseconds]
    mean_freeze_ratio: Share
    stage_freeze_ratio: Mapping[int, Share]
    critical_path: tuple[ActionText, ...]
    solver: SolverReport
    schedule: Annotated[Order | None, Field(alias="ranks")] = None
    deferrable_share: Mapping[int, Share] = field(default_factory=dict)
    period_ms: Makespan | None = None

    @property
    def span_ms(self) -> Makespan:
        """The pipeline's part of a step: the period where steps overlap, else the makespan."""
        return self.period_ms or self.makespan_ms

    def changes(self, host: PipelineSchedule) -> bool:
        """Return whether the plan defers or freezes anything, compared with the host's own order."""
        return self.mean_freeze_ratio > 0.0 or self.schedule not in (None, host)

    @cached_property
    def ratio_of_microbatch(self) -> Mapping[tuple[int, int], float]:
        """Freeze ratios by (stage, microbatch), whichever action computes its weight gradients."""
        return {(action.stage, action.microbatch): ratio for action, ratio in self.freeze_ratio.items()}
