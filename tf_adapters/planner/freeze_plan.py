"""A plan: what to freeze, and the batch that follows."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from tf_adapters.errors import PlanInputError, first_problem
from tf_adapters.planner.program import SolverStatus
from tf_adapters.schedule.durations import Milliseconds, Quotient, Share
from tf_adapters.schedule.ir import Action, PipelineSchedule

__all__ = ["FreezePlan", "FrontierPoint", "Makespan", "Order", "SolverReport"]

# As JSON has them: actions and orders are texts, what is infinite is null.
_Action = Annotated[Action, BeforeValidator(lambda value: Action.parse(value) if isinstance(value, str) else value)]
Order = Annotated[PipelineSchedule, BeforeValidator(lambda rows: _order(rows) if isinstance(rows, list) else rows)]
_Noise = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value), Field(ge=0)]


@dataclass(frozen=True)
class Makespan:
    """How long a batch takes in ms with nothing frozen, as planned, and with everything frozen."""

    unfrozen: Milliseconds
    planned: Milliseconds
    fully_frozen: Milliseconds
    host: Milliseconds | None = None


@dataclass(frozen=True)
class SolverReport:
    """Which solver ran, how it ended, its wall time in s, and the plan's proven distance from the optimum.

    No freeze ratios within the budgets end the batch before (1 - optimality_gap) * planned makespan, unless that is
    before the target.
    """

    name: str
    status: SolverStatus
    seconds: Milliseconds
    optimality_gap: Quotient


@dataclass(frozen=True)
class FrontierPoint:
    """One of the plans that a plan which is to pay was chosen from.

    Attributes:
        makespan_ms: of its batch, planned.
        mean_freeze_ratio: its plan's.
        speed: the host's step without us over a step with this plan.
        added_noise: by stage, as ``planner.learning`` has it; infinite where a stage computes no weight gradients.
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
    chosen: bool = False

    @property
    def progress_in_time(self) -> float:
        """Progress in the time in which the host alone makes a progress of 1."""
        return self.speed * self.progress

    def to_json(self) -> dict[str, Any]:
        """With ``progress_in_time``; what is infinite is null."""
        added = {str(stage): value if math.isfinite(value) else None for stage, value in self.added_noise.items()}
        return {**asdict(self), "added_noise": added, "progress_in_time": self.progress_in_time}


def _one_chosen(points: tuple[FrontierPoint, ...]) -> tuple[FrontierPoint, ...]:
    if points and sum(point.chosen for point in points) != 1:
        raise ValueError("one point of a frontier is the plan")
    return points


@dataclass(frozen=True)
class FreezePlan:
    """What to freeze, and the batch that follows. Times in ms from the batch's start, ratios in [0, 1].

    ``freeze_ratio`` has the actions that compute weight gradients (B and W), ``start_ms`` and
    ``duration_ms`` have every action. The means are over B and W actions, of all stages or of one. Where weight
    gradients may wait, ``schedule`` is the order to run and ``deferrable_share`` the share of a stage's backwards that
    can wait. ``frontier`` is what a plan that is to pay was chosen from, by growing freeze ratio.
    """

    makespan_ms: Makespan
    freeze_ratio: Mapping[_Action, Share]
    start_ms: Mapping[_Action, Milliseconds]
    duration_ms: Mapping[_Action, Milliseconds]
    mean_freeze_ratio: Share
    stage_freeze_ratio: Mapping[int, Share]
    critical_path: tuple[_Action, ...]
    solver: SolverReport
    schedule: Annotated[Order | None, Field(alias="ranks")] = None
    deferrable_share: Mapping[int, Share] = field(default_factory=dict)
    frontier: Annotated[tuple[FrontierPoint, ...], AfterValidator(_one_chosen)] = ()

    @cached_property
    def ratio_of_microbatch(self) -> Mapping[tuple[int, int], float]:
        """Freeze ratios by (stage, microbatch), whichever action computes its weight gradients."""
        return {(action.stage, action.microbatch): ratio for action, ratio in self.freeze_ratio.items()}

    def to_json(self) -> dict[str, Any]:
        """The PLAN object that ``tf-adapters plan`` prints; actions and stages become text keys."""
        return {
            **({"ranks": self.schedule.to_text()} if self.schedule else {}),
            "makespan_ms": {name: ms for name, ms in asdict(self.makespan_ms).items() if ms is not None},
            "freeze_ratio": _text_keys(self.freeze_ratio),
            "start_ms": _text_keys(self.start_ms),
            "duration_ms": _text_keys(self.duration_ms),
            "mean_freeze_ratio": self.mean_freeze_ratio,
            "stage_freeze_ratio": _text_keys(self.stage_freeze_ratio),
            **({"deferrable_share": _text_keys(self.deferrable_share)} if self.deferrable_share else {}),
            **({"frontier": [point.to_json() for point in self.frontier]} if self.frontier else {}),
            "critical_path": [str(action) for action in self.critical_path],
            "solver": {**asdict(self.solver), "status": self.solver.status.value},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FreezePlan:
        """Read a PLAN object, the inverse of ``to_json``. Raises PlanInputError naming the wrong field."""
        try:
            return _reader().validate_python(data)
        except ValidationError as error:
            raise PlanInputError(first_problem(error)) from error


def _order(rows: list[Any]) -> PipelineSchedule:
    if not all(isinstance(row, list) for row in rows):
        raise ValueError("expected one list of actions for each rank")
    return PipelineSchedule.from_text(rows)


def _text_keys(values: Mapping[Any, float]) -> dict[str, float]:
    return {str(key): value for key, value in values.items()}


@functools.cache
def _reader() -> TypeAdapter[FreezePlan]:
    return TypeAdapter(FreezePlan)
