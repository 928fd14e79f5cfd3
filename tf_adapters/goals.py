"""The goal of a run: one word for the settings that decide how weight gradients are skipped, sampled or deferred."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

Goal = Literal["exact", "pays", "paper"]

DEFAULT: Goal = "exact"

GOALS: Mapping[str, Mapping[str, Any]] = {
    "exact": {"max_freeze_ratio": 0.0, "granularity": "tensor", "weight_gradients": "deferred"},
    "pays": {"max_freeze_ratio": "auto", "granularity": "token", "weight_gradients": "deferred"},
    "paper": {"max_freeze_ratio": 0.8, "granularity": "tensor", "weight_gradients": "in_place"},
}
LEVERS = tuple(GOALS[DEFAULT])
"""The settings that a goal chooses."""

_DEFAULTS: Mapping[str, Any] = {
    "method": "timely",
    "target_speedup": None,
    "freeze_limits": {},
    "gradient_scale": "skipped_as_zero",
}
"""Other settings that ask for freezing, and the values with which they do not."""


def with_goal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and those that their goal chooses. A setting that is given stays.

    Settings without a goal have ``DEFAULT``, unless one of ``LEVERS`` is given or another setting asks for freezing.
    """
    found = dict(settings)
    chosen = any(name in found for name in LEVERS)
    chosen = chosen or any(found.get(name, default) != default for name, default in _DEFAULTS.items())
    if found.get("goal") is None:
        found["goal"] = None if chosen else DEFAULT
    levers = dict(GOALS.get(str(found["goal"]), {}))
    method = found.get("method", "timely")
    if method in ("apf", "autofreeze"):  # they have no plan, which deferral and "auto" need
        levers = {}
    elif method not in ("timely", "none"):  # they choose whole tensors
        levers.pop("granularity", None)
    return levers | found


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
    {"granularity": "tensor"},
    {"weight_gradients": "in_place"},
    {"granularity": "tensor", "weight_gradients": "in_place"},
    {"granularity": "block", "weight_gradients": "in_place"},
)
