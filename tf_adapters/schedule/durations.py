"""Bounds of an action's duration, and the types of values in JSON files, which are checked when read."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter

from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.ir import Action, PipelineSchedule

Milliseconds = Annotated[float, Field(ge=0, le=1e15)]  # so that sums are finite
# A rounding error may put a mean of ratios above 1. The report is still valid.
Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6, allow_inf_nan=False)]
Quotient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Bounds:
    """Duration of an action in ms: ``lower`` with all parameters frozen, ``upper`` with no parameter frozen."""

    lower: float
    upper: float


def _number(value: Any, most: float, allowed: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:
        number = math.inf
    if not 0.0 <= number <= most or math.isinf(number):
        raise ValueError(f"is not {allowed}")
    return number


def _bounds(pair: Any) -> Bounds:
    pair = (pair.lower, pair.upper) if isinstance(pair, Bounds) else pair
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise ValueError("is not [all frozen, nothing frozen], two times in ms")
    lower, upper = _PAIR.validate_python(pair)
    if lower > upper:
        raise ValueError(f"all frozen takes {lower:g} ms, more than nothing frozen, {upper:g} ms: min exceeds max")
    return Bounds(lower, upper)


def _action(value: Any) -> Action:
    try:
        return value if isinstance(value, Action) else Action.parse(value)
    except ScheduleError:
        raise ValueError("is not an action: expected stage, one of F B I W, microbatch, like '2F0'") from None


def _edge(value: Any) -> tuple[Action, Action]:
    try:
        source, target = value.split("->") if isinstance(value, str) else value
        return _action(source), _action(target)
    except (TypeError, ValueError):
        raise ValueError("is not an edge such as '0F0->1F0'") from None


def _order(rows: Any) -> PipelineSchedule:
    if isinstance(rows, PipelineSchedule):
        return rows
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError("is not one list of actions per pipeline rank")
    return PipelineSchedule(_ROWS.validate_python(rows))


Time = Annotated[float, PlainValidator(lambda value: _number(value, math.inf, "a finite time in ms of at least 0"))]
Ratio = Annotated[float, PlainValidator(lambda value: _number(value, 1.0, "a number from 0 to 1"))]
ActionText = Annotated[Action, PlainValidator(_action), PlainSerializer(str)]
EdgeText = Annotated[
    tuple[Action, Action], PlainValidator(_edge), PlainSerializer(lambda edge: f"{edge[0]}->{edge[1]}")
]
Order = Annotated[PipelineSchedule, PlainValidator(_order), PlainSerializer(lambda order: order.to_text())]
BoundsPair = Annotated[Bounds, PlainValidator(_bounds), PlainSerializer(lambda of: [of.lower, of.upper])]

_PAIR = TypeAdapter(tuple[Time, Time])
_ROWS = TypeAdapter(tuple[tuple[ActionText, ...], ...])
