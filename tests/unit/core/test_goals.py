"""Goals: what each one chooses, what overrides it, and what is nearest where a host cannot run it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.goals import GOALS, LEVERS

EXACT = {"max_freeze_ratio": 0.0, "granularity": "tensor", "weight_gradients": "deferred"}
PAPER = {"max_freeze_ratio": 0.8, "granularity": "tensor", "weight_gradients": "in_place"}


def levers(config: TimelyFreezeConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in LEVERS}


@pytest.mark.parametrize(
    ("section", "goal", "expected"),
    [
        ({}, "exact", EXACT),
        ({"seed": 3, "monitoring_steps": 8}, "exact", EXACT),
        ({"extra_microbatches": 4}, "exact", EXACT),
        ({"goal": None}, "exact", EXACT),
        ({"goal": "exact"}, "exact", EXACT),
        ({"goal": "paper"}, "paper", PAPER),
        ({"goal": "paper", "granularity": "token"}, "paper", {**PAPER, "granularity": "token"}),
        ({"goal": "exact", "weight_gradients": "in_place"}, "exact", {**EXACT, "weight_gradients": "in_place"}),
        ({"goal": "paper", "method": "apf"}, "paper", PAPER),
        ({"goal": "exact", "method": "none"}, "exact", EXACT),
    ],
)
def test_a_goal_chooses_what_is_not_given(section, goal, expected):
    config = TimelyFreezeConfig.parse(section)
    assert config.goal == goal
    assert levers(config) == expected


STAYS_EXACT: list[tuple[str, Any]] = [
    ("max_freeze_ratio", 0),
    ("granularity", "tensor"),
    ("weight_gradients", "deferred"),
    ("weight_gradients", "in_place"),
    ("extra_microbatches", 2),
    ("extra_microbatches", "auto"),
    ("method", "timely"),
    ("target_speedup", None),
    ("freeze_limits", {}),
    ("freeze_exclude", ["*.bias"]),
    ("gradient_scale", "skipped_as_zero"),
    ("monitoring_steps", 8),
    ("replan_threshold", 0),
    ("placement", "v"),
]
ASKS_FOR_ANOTHER_WAY: list[tuple[str, Any]] = [
    ("max_freeze_ratio", 0.6),
    ("max_freeze_ratio", 0.8),
    ("granularity", "token"),
    ("granularity", "block"),
    ("method", "none"),
    ("method", "apf"),
    ("method", "timely+autofreeze"),
    ("target_speedup", 1.2),
    ("freeze_limits", {"*embed*": 0.2}),
    ("gradient_scale", "computed_mean"),
]
CONTRADICT_EXACT = {"max_freeze_ratio", "target_speedup", "method"}


@pytest.mark.parametrize("first", [*STAYS_EXACT, *ASKS_FOR_ANOTHER_WAY], ids=str)
@pytest.mark.parametrize("second", [*STAYS_EXACT, *ASKS_FOR_ANOTHER_WAY], ids=str)
def test_a_section_without_a_goal_is_exact_unless_a_setting_asks_for_another_way(first, second):
    """Every pair of settings: what is not given is the default goal's, or the paper's."""
    section = dict([first, second])
    asks = [pair for pair in section.items() if pair in ASKS_FOR_ANOTHER_WAY]
    try:
        config = TimelyFreezeConfig.parse(section)
    except ConfigError:
        assert len(section) == 2  # two settings that contradict each other: their own tests say which
        return
    assert config.goal == (None if asks else "exact")
    given = {name: value for name, value in section.items() if name in LEVERS}
    assert levers(config) == {**(PAPER if asks else EXACT), **given}


@pytest.mark.parametrize(("name", "value"), [*STAYS_EXACT, *ASKS_FOR_ANOTHER_WAY], ids=str)
def test_the_goal_exact_beside_a_setting_that_changes_gradients_is_refused_in_one_line(name, value):
    section = {"goal": "exact", name: value}
    if (name, value) in ASKS_FOR_ANOTHER_WAY and name in CONTRADICT_EXACT and value != "none":
        line = f'goal is "exact" and timely_freeze.{name} is {value!r}, which changes gradients: leave {name} out'
        with pytest.raises(ConfigError, match=re.escape(line)):
            TimelyFreezeConfig.parse(section)
    elif name != "freeze_limits" or not value:  # a limit above max_freeze_ratio has its own line
        assert TimelyFreezeConfig.parse(section).max_freeze_ratio == 0


@pytest.mark.parametrize("section", [{}, {"max_freeze_ratio": 0.6}, *({"goal": goal} for goal in GOALS)])
def test_settings_that_are_written_down_are_the_same_when_they_are_read(section):
    config = TimelyFreezeConfig.parse(section)
    assert TimelyFreezeConfig.parse(config.model_dump()) == config


def nearest(section: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(levers(config).values()) for config in TimelyFreezeConfig.parse(section).fallbacks()]


def test_what_a_host_cannot_run_is_left_out_step_by_step():
    assert nearest({}) == [
        (0.0, "tensor", "deferred"),
        (0.0, "tensor", "in_place"),
        (0.0, "block", "in_place"),
    ]
    assert nearest({"goal": "paper"}) == [(0.8, "tensor", "in_place"), (0.8, "block", "in_place")]


def test_what_the_user_has_chosen_stays():
    assert nearest({"weight_gradients": "deferred", "granularity": "token"}) == [(0.8, "token", "deferred")]
    assert nearest({"goal": "exact", "granularity": "block"}) == [
        (0.0, "block", "deferred"),
        (0.0, "block", "in_place"),
    ]
    assert nearest({"extra_microbatches": "auto"}) == [(0.0, "tensor", "deferred")]


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"goal": "pays"}, "timely_freeze.goal is 'pays': allowed is " + '"exact", "paper", or null'),
        ({"max_freeze_ratio": "auto"}, "timely_freeze.max_freeze_ratio is 'auto': allowed is a number from 0 to 1"),
    ],
)
def test_what_was_taken_out_is_refused_with_what_is_allowed(section, line):
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        TimelyFreezeConfig.parse(section)
