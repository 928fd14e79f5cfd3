"""A plan: what to freeze, and the batch that follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, computed_field

from tf_adapters.planner.program import SolverStatus
from tf_adapters.schedule.durations import ActionText, Milliseconds, Order, Quotient, Share
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.values import Value

_Noise = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    Field(ge=0),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
]
"""JSON has no infinity: null."""


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
class FrontierPoint:
    """One of the candidates from which the plan that pays most was chosen.

    Attributes:
        makespan_ms: the planned makespan of its batch; the planned period where steps overlap.
        mean_freeze_ratio: the mean freeze ratio of its plan.
        speed: the time of the host's own step over the time of a step with this plan.
        added_noise: by stage, as ``measuring.learning`` has it; infinite where a stage computes no weight gradients.
        progress: what a step gains, as a share of a step with nothing frozen.
        progress_error: its standard error.
        chosen: whether it is the plan.
    """

    makespan_ms: Milliseconds
    mean_freeze_ratio: Share
    speed: Quotient
    added_noise: Mapping[int, _Noise]
    progress: Annotated[float, Field(allow_inf_nan=False)]
    progress_error: Quotient
    chosen: bool

    @computed_field  # type: ignore[prop-decorator]
    @property
    def progress_in_time(self) -> float:
        """Progress in the time in which the host alone makes a progress of 1."""
        return self.speed * self.progress


def _one_chosen(points: tuple[FrontierPoint, ...]) -> tuple[FrontierPoint, ...]:
    if points and sum(point.chosen for point in points) != 1:
        raise ValueError("one point of a frontier is the plan")
    return points


@dataclass(frozen=True)
class FreezePlan(Value):
    """The freeze ratios of a plan, and the batch that results. Times in ms from the batch's start, ratios in [0, 1].

    ``freeze_ratio`` has the actions that compute weight gradients (B and W), ``start_ms`` and
    ``duration_ms`` have every action. The means are over B and W actions, of all stages or of one. Where weight
    gradients may wait, ``schedule`` is the order to run and ``deferrable_share`` the share of a stage's backwards that
    can wait. ``frontier`` has the candidates from which the plan that pays most was chosen, by growing freeze ratio.
    Where steps overlap, ``period_ms`` is the time from a rank's first action to its first action in the next step, and
    ``makespan_ms`` is the time of a batch alone.
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
    frontier: Annotated[tuple[FrontierPoint, ...], AfterValidator(_one_chosen)] = ()
    period_ms: Makespan | None = None

    @property
    def span_ms(self) -> Makespan:
        """The pipeline's part of a step: the period where steps overlap, else the makespan."""
        return self.period_ms or self.makespan_ms

    def changes(self, host: PipelineSchedule) -> bool:
        """Return whether the plan defers or freezes anything, compared with the host's own order."""
        return self.mean_freeze_ratio > 0.0 or self.schedule not in (None, host)

    @cached_property
    def chosen(self) -> int:
        """The place of this plan in its ``frontier``, which it has."""
        return next(place for place, point in enumerate(self.frontier) if point.chosen)

    @cached_property
    def ratio_of_microbatch(self) -> Mapping[tuple[int, int], float]:
        """Freeze ratios by (stage, microbatch), whichever action computes its weight gradients."""
        return {(action.stage, action.microbatch): ratio for action, ratio in self.freeze_ratio.items()}
