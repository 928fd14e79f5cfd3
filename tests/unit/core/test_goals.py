"""Goals: what each one chooses, what overrides it, and what is nearest where a host cannot run it."""

from __future__ import annotations

from typing import Any

import pytest

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.goals import GOALS, LEVERS

EXACT = {"max_freeze_ratio": 0.0, "granularity": "tensor", "weight_gradients": "deferred"}
PAYS = {"max_freeze_ratio": "auto", "granularity": "token", "weight_gradients": "deferred"}
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
        ({"goal": "pays"}, "pays", PAYS),
        ({"goal": "paper"}, "paper", PAPER),
        ({"goal": "pays", "granularity": "tensor"}, "pays", {**PAYS, "granularity": "tensor"}),
        ({"goal": "exact", "max_freeze_ratio": 0.1}, "exact", {**EXACT, "max_freeze_ratio": 0.1}),
        ({"goal": "pays", "method": "apf"}, "pays", PAPER),
        ({"goal": "pays", "method": "timely+apf"}, "pays", {**PAYS, "granularity": "tensor"}),
        ({"goal": "pays", "method": "none"}, "pays", PAYS),
    ],
)
def test_a_goal_chooses_what_is_not_given(section, goal, expected):
    config = TimelyFreezeConfig.parse(section)
    assert config.goal == goal
    assert levers(config) == expected


@pytest.mark.parametrize(
    "section",
    [
        {"max_freeze_ratio": 0.6},
        {"weight_gradients": "deferred"},
        {"granularity": "token"},
        {"method": "none"},
        {"method": "apf"},
        {"target_speedup": 1.2},
        {"freeze_limits": {"*embed*": 0.2}},
        {"gradient_scale": "computed_mean"},
    ],
)
def test_a_run_that_chooses_its_own_way_has_no_goal_and_the_papers_settings_for_the_rest(section):
    config = TimelyFreezeConfig.parse(section)
    assert config.goal is None
    assert levers(config) == {**PAPER, **{name: value for name, value in section.items() if name in LEVERS}}


@pytest.mark.parametrize("section", [{}, {"max_freeze_ratio": 0.6}, *({"goal": goal} for goal in GOALS)])
def test_settings_that_are_written_down_are_the_same_when_they_are_read(section):
    config = TimelyFreezeConfig.parse(section)
    assert TimelyFreezeConfig.parse(config.model_dump()) == config


def nearest(section: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(levers(config).values()) for config in TimelyFreezeConfig.parse(section).fallbacks()]


def test_what_a_host_cannot_run_is_left_out_step_by_step():
    assert nearest({"goal": "pays"}) == [
        ("auto", "token", "deferred"),
        ("auto", "tensor", "deferred"),
        ("auto", "token", "in_place"),
        ("auto", "tensor", "in_place"),
        ("auto", "block", "in_place"),
    ]
    assert nearest({}) == [
        (0.0, "tensor", "deferred"),
        (0.0, "tensor", "in_place"),
        (0.0, "block", "in_place"),
    ]
    assert nearest({"goal": "paper"}) == [(0.8, "tensor", "in_place"), (0.8, "block", "in_place")]


def test_what_the_user_has_chosen_stays():
    assert nearest({"weight_gradients": "deferred", "granularity": "token"}) == [(0.8, "token", "deferred")]
    assert nearest({"goal": "pays", "granularity": "block"}) == [
        ("auto", "block", "deferred"),
        ("auto", "block", "in_place"),
    ]
    deferred = [("auto", "token", "deferred"), ("auto", "tensor", "deferred")]
    assert nearest({"goal": "pays", "extra_microbatches": "auto"}) == deferred
    assert nearest({"extra_microbatches": "auto"}) == [(0.0, "tensor", "deferred")]
