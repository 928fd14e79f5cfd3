"""Reads and checks what the planner is given; a refusal is one line that names the field and the value."""

from __future__ import annotations

import difflib
import math
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from tf_adapters.errors import PlanInputError, ScheduleError
from tf_adapters.schedule.ir import Action, PipelineSchedule

__all__ = [
    "PlanInput",
    "check_communication",
    "check_flag",
    "check_overhead",
    "check_ratio",
    "check_target",
    "check_times",
    "read_input",
]

_REQUIRED = ("ranks", "times", "max_freeze_ratio")
_FIELDS = (*_REQUIRED, "communication", "overhead", "target_makespan_ms", "first_stage_vanishes")


class PlanInput(NamedTuple):
    """The INPUT contract, parsed; times, communication and overhead in ms are not checked yet (``plan`` does)."""

    schedule: PipelineSchedule
    times: dict[Action, Any]
    max_freeze_ratio: Any
    communication: dict[tuple[Action, Action], Any]
    overhead: dict[Action, Any]
    target_makespan_ms: Any
    first_stage_vanishes: Any


def read_input(data: object) -> PlanInput:
    """Parse the planner's INPUT object. Raises PlanInputError."""
    if not isinstance(data, dict):
        raise PlanInputError(f"the input is {_show(data)}: expected an object with {', '.join(_FIELDS)}")
    for key in data:
        if key not in _FIELDS:
            raise PlanInputError(f"unknown field {_show(key)}{_hint(key)}: allowed are {', '.join(_FIELDS)}")
    for key in _REQUIRED:
        if key not in data:
            raise PlanInputError(f"{key}: missing")
    return PlanInput(
        schedule=_read_ranks(data["ranks"]),
        times={_read_action(key, "times"): value for key, value in _object(data, "times").items()},
        max_freeze_ratio=data["max_freeze_ratio"],
        communication={_read_edge(key): value for key, value in _object(data, "communication").items()},
        overhead={_read_action(key, "overhead"): value for key, value in _object(data, "overhead").items()},
        target_makespan_ms=data.get("target_makespan_ms", 0.0),
        first_stage_vanishes=data.get("first_stage_vanishes", False),
    )


def check_ratio(value: object) -> float:
    """``max_freeze_ratio`` as a number in [0, 1]. Raises PlanInputError."""
    number = _number(value)
    if number is None or not 0.0 <= number <= 1.0:
        raise PlanInputError(f"max_freeze_ratio: {_show(value)} is not a number from 0 to 1")
    return number


def check_target(value: object) -> float:
    """``target_makespan_ms`` as a time in ms. Raises PlanInputError."""
    return _check_time(value, "target_makespan_ms")


def check_flag(value: object) -> bool:
    """``first_stage_vanishes`` as it is. Raises PlanInputError."""
    if not isinstance(value, bool):
        raise PlanInputError(f"first_stage_vanishes: {_show(value)} is neither true nor false")
    return value


def check_times(schedule: PipelineSchedule, times: Mapping[Action, Any]) -> dict[Action, tuple[float, float]]:
    """[all frozen, nothing frozen] in ms for each action of ``schedule``. Raises PlanInputError."""
    actions = set(schedule.actions)
    for action in times:
        if action not in actions:
            raise PlanInputError(f"times: {_show(str(action))} is not an action of the schedule")
    for action in schedule.actions:
        if action not in times:
            raise PlanInputError(f"times: '{action}' is missing: each needs [all frozen, nothing frozen]")
    return {action: _check_pair(action, times[action]) for action in schedule.actions}


def check_communication(
    schedule: PipelineSchedule, communication: Mapping[tuple[Action, Action], Any]
) -> dict[tuple[Action, Action], float]:
    """Milliseconds per edge between stages of ``schedule``. Raises PlanInputError."""
    if not communication:
        return {}
    edges = set(schedule.transfers())
    for source, target in communication:
        if (source, target) not in edges:
            raise PlanInputError(f"communication: '{source}->{target}' is not an edge between stages of the schedule")
    return {
        (source, target): _check_time(value, f"communication['{source}->{target}']")
        for (source, target), value in communication.items()
    }


def check_overhead(schedule: PipelineSchedule, overhead: Mapping[Action, Any]) -> dict[Action, float]:
    """Milliseconds before actions of ``schedule``. Raises PlanInputError."""
    actions = set(schedule.actions) if overhead else set()
    for action in overhead:
        if action not in actions:
            raise PlanInputError(f"overhead: {_show(str(action))} is not an action of the schedule")
    return {action: _check_time(value, f"overhead['{action}']") for action, value in overhead.items()}


def _check_pair(action: Action, value: Any) -> tuple[float, float]:
    field = f"times['{action}']"
    pair = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(pair) != 2:
        raise PlanInputError(f"{field}: {_show(value)} is not [all frozen, nothing frozen], two times in ms")
    lower, upper = (_check_time(time, f"{field}[{k}]") for k, time in enumerate(pair))
    if lower > upper:
        raise PlanInputError(
            f"{field}: all frozen takes {lower:g} ms, more than nothing frozen, {upper:g} ms: min exceeds max"
        )
    return lower, upper


def _check_time(value: object, field: str) -> float:
    number = _number(value)
    if number is None or not math.isfinite(number) or number < 0.0:
        raise PlanInputError(f"{field}: {_show(value)} is not a finite time in ms of at least 0")
    return number


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read_ranks(value: object) -> PipelineSchedule:
    if not isinstance(value, list) or not all(isinstance(rank, list) for rank in value):
        raise PlanInputError(f"ranks: {_show(value)} is not one list of actions per pipeline rank")
    actions = [
        [_read_action(text, f"ranks[{rank}][{slot}]") for slot, text in enumerate(texts)]
        for rank, texts in enumerate(value)
    ]
    try:
        return PipelineSchedule(tuple(map(tuple, actions))).validate()
    except ScheduleError as error:
        raise PlanInputError(f"ranks: {error}") from error


def _read_action(text: Any, field: str) -> Action:
    try:
        return Action.parse(text)
    except ScheduleError as error:
        raise PlanInputError(
            f"{field}: {_show(text)} is not an action: expected stage, one of F B I W, microbatch, like '2F0'"
        ) from error


def _read_edge(text: Any) -> tuple[Action, Action]:
    ends = text.split("->") if isinstance(text, str) else []
    if len(ends) != 2:
        raise PlanInputError(f"communication: {_show(text)} is not an edge such as '0F0->1F0'")
    source, target = (_read_action(end, f"communication[{_show(text)}]") for end in ends)
    return source, target


def _object(data: dict[str, Any], field: str) -> dict[str, Any]:
    value = data.get(field, {})
    if not isinstance(value, dict):
        raise PlanInputError(f"{field}: {_show(value)} is not an object")
    return value


def _hint(key: object) -> str:
    close = difflib.get_close_matches(str(key), _FIELDS, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def _show(value: object) -> str:
    return reprlib.repr(value)
