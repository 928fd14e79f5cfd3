"""The goal of a run: one word for the settings that decide how weight gradients are skipped, sampled or deferred."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

Goal = Literal["exact", "paper"]

DEFAULT: Goal = "exact"

GOALS: Mapping[str, Mapping[str, Any]] = {
    "exact": {"max_freeze_ratio": 0.0, "granularity": "tensor", "weight_gradients": "deferred"},
    "paper": {"max_freeze_ratio": 0.8, "granularity": "tensor", "weight_gradients": "in_place"},
}
LEVERS = tuple(GOALS[DEFAULT])
"""The settings that a goal chooses."""

_LEAVES_DEFAULT: Mapping[str, Callable[[Any], bool]] = {
    "max_freeze_ratio": lambda value: value != 0,
    "granularity": lambda value: value != "tensor",
    "target_speedup": lambda value: value is not None,
    "method": lambda value: value != "timely",
    "freeze_limits": bool,
    "gradient_scale": lambda value: value != "skipped_as_zero",
}
"""The settings that can ask for another way than ``DEFAULT``, and whether a value does."""

_CONTRADICTS_EXACT = ("max_freeze_ratio", "target_speedup", "method")


def _leaving_default(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the given settings that ask for another way than ``DEFAULT``."""
    return [name for name, asks in _LEAVES_DEFAULT.items() if name in settings and asks(settings[name])]


def contradicting(settings: Mapping[str, Any]) -> str | None:
    """Return the name of a given setting that changes gradients although the goal is ``"exact"``; None without one."""
    if settings.get("goal") != "exact":
        return None
    found = (name for name in _leaving_default(settings) if name in _CONTRADICTS_EXACT and settings[name] != "none")
    return next(found, None)


def with_goal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and those that their goal chooses. A setting that is given stays.

    Settings without a goal have ``DEFAULT``, unless one of them asks for another way.
    """
    found = dict(settings)
    if found.get("goal") is None:
        found["goal"] = None if _leaving_default(found) else DEFAULT
    return {**GOALS.get(str(found["goal"]), {}), **found}


def fallbacks(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield changes of settings that a host may need, nearest first. The first one is no change.

    They change only settings that the goal has chosen. If another setting needs deferral, it stays.
    """
    goal = GOALS.get(str(settings["goal"]), {})
    free = {name for name, value in goal.items() if settings[name] == value}
    if settings["extra_microbatches"]:
        free.discard("weight_gradients")
    seen: list[dict[str, Any]] = []
    for change in _NEARER:
        changed = {name: value for name, value in change.items() if settings[name] != value}
        if changed.keys() <= free and changed not in seen:
            seen.append(changed)
            yield changed


_NEARER: tuple[dict[str, Any], ...] = (
    {},
    {"weight_gradients": "in_place"},
    {"granularity": "block", "weight_gradients": "in_place"},
)
