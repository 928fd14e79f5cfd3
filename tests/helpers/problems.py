"""The planner's input for tests, from facts and limits together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tf_adapters.measuring.measurement import Measurement
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.schedule.ir import PipelineSchedule

_LIMITS = {field.name for field in fields(Limits)}


def plan_problem(
    schedule: PipelineSchedule, times: Mapping[Any, Any], max_freeze_ratio: float, **others: Any
) -> PlanProblem:
    return changed(PlanProblem(Measurement(schedule, times), Limits(max_freeze_ratio)), **others)


def changed(problem: PlanProblem, **others: Any) -> PlanProblem:
    """The same with some facts or limits replaced."""
    limits = {name: value for name, value in others.items() if name in _LIMITS}
    facts = {name: value for name, value in others.items() if name not in _LIMITS}
    return PlanProblem(replace(problem.measurement, **facts), replace(problem.limits, **limits))
