"""A plan: what to freeze, and the batch that follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

from tf_adapters.errors import PlanInputError
from tf_adapters.planner.program import SolverStatus
from tf_adapters.schedule.ir import Action, PipelineSchedule

__all__ = ["FreezePlan", "FrontierPoint", "Makespan", "SolverReport"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Makespan:
    """How long a batch takes in ms with nothing frozen, as planned, and with everything frozen."""

    unfrozen: float
    planned: float
    fully_frozen: float
    host: float | None = None


@dataclass(frozen=True)
class SolverReport:
    """Which solver ran, how it ended, its wall time in s, and the plan's proven distance from the optimum.

    No freeze ratios within the budgets end the batch before (1 - optimality_gap) * planned makespan, unless that is
    before the target.
    """

    name: str
    status: SolverStatus
    seconds: float
    optimality_gap: float


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

    makespan_ms: float
    mean_freeze_ratio: float
    speed: float
    added_noise: Mapping[int, float]
    progress: float
    progress_error: float
    chosen: bool = False

    @property
    def progress_in_time(self) -> float:
        """Progress in the time in which the host alone makes a progress of 1."""
        return self.speed * self.progress

    def to_json(self) -> dict[str, Any]:
        """With ``progress_in_time``; what is infinite is null."""
        added = {str(stage): value if math.isfinite(value) else None for stage, value in self.added_noise.items()}
        return {**asdict(self), "added_noise": added, "progress_in_time": self.progress_in_time}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FrontierPoint:
        """The inverse of ``to_json``."""
        added = {int(s): math.inf if value is None else float(value) for s, value in data["added_noise"].items()}
        return cls(**{**{f.name: data[f.name] for f in fields(cls)}, "added_noise": added})


@dataclass(frozen=True)
class FreezePlan:
    """What to freeze, and the batch that follows. Times in ms from the batch's start, ratios in [0, 1].

    ``freeze_ratio`` has the actions that compute weight gradients (B and W), ``start_ms`` and
    ``duration_ms`` have every action. The means are over B and W actions, of all stages or of one. Where weight
    gradients may wait, ``schedule`` is the order to run and ``deferrable_share`` the share of a stage's backwards that
    can wait. ``frontier`` is what a plan that is to pay was chosen from, by growing freeze ratio.
    """

    makespan_ms: Makespan
    freeze_ratio: Mapping[Action, float]
    start_ms: Mapping[Action, float]
    duration_ms: Mapping[Action, float]
    mean_freeze_ratio: float
    stage_freeze_ratio: Mapping[int, float]
    critical_path: tuple[Action, ...]
    solver: SolverReport
    schedule: PipelineSchedule | None = None
    deferrable_share: Mapping[int, float] = field(default_factory=dict)
    frontier: tuple[FrontierPoint, ...] = ()

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
        ranks = data.get("ranks") if isinstance(data, Mapping) else None
        return cls(
            schedule=None if ranks is None else _read(data, "ranks", PipelineSchedule.from_text),
            makespan_ms=_read(data, "makespan_ms", lambda value: Makespan(**value)),
            freeze_ratio=_read(data, "freeze_ratio", _action_keys),
            start_ms=_read(data, "start_ms", _action_keys),
            duration_ms=_read(data, "duration_ms", _action_keys),
            mean_freeze_ratio=_read(data, "mean_freeze_ratio", float),
            stage_freeze_ratio=_read(data, "stage_freeze_ratio", _stage_keys),
            deferrable_share=_read(data, "deferrable_share", _stage_keys) if "deferrable_share" in data else {},
            frontier=_read(data, "frontier", _points) if "frontier" in data else (),
            critical_path=_read(data, "critical_path", lambda value: tuple(map(Action.parse, value))),
            solver=_read(
                data,
                "solver",
                lambda value: SolverReport(**{**value, "status": SolverStatus(value["status"])}),
            ),
        )


def _text_keys(values: Mapping[Any, float]) -> dict[str, float]:
    return {str(key): value for key, value in values.items()}


def _action_keys(values: Mapping[str, float]) -> dict[Action, float]:
    return {Action.parse(key): float(value) for key, value in values.items()}


def _stage_keys(values: Mapping[str, float]) -> dict[int, float]:
    return {int(key): float(value) for key, value in values.items()}


def _points(values: Sequence[Mapping[str, Any]]) -> tuple[FrontierPoint, ...]:
    return tuple(map(FrontierPoint.from_json, values))


def _read(data: Mapping[str, Any], field: str, convert: Callable[[Any], _T]) -> _T:
    if not isinstance(data, Mapping) or field not in data:
        raise PlanInputError(f"{field}: missing in the plan")
    try:
        return convert(data[field])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanInputError(f"{field}: not what a plan has there ({error})") from error
