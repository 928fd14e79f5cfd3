"""Goals on every host: what they choose, what they do to the training, and what a host cannot run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hosts import STAGES, Tensors, build
from logged import Lines

from tf_adapters.goals import GOALS

pytestmark = pytest.mark.distributed

LIFE = {"warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 1, "on_error": "raise"}
MEANS = {
    "exact": "the same bits as without",
    "paper": "skips up to 80% of weight gradients",
}
STEPS = 9


def trained(host: str, section: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    with Lines() as log:
        training = build(host)
        if section is not None:
            training.attach({**LIFE, **section, "output_dir": folder})
            attached = training.controller
            training.attach({**LIFE, **section, "output_dir": folder})
            assert training.controller is attached, "a second attach with the same settings is the same run"
        losses = [training.step(number) for number in range(STEPS)]
        result: dict[str, Any] = {"losses": losses, "parameters": training.parameters(), "log": log.seen}
        if training.controller is not None:
            state, config = training.controller.state, training.controller.config
            result |= {"failure": state.failure, "plan": state.plan, "config": config}
            training.detach()
        return result


def same(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("goal", [*GOALS, None])
def test_a_goal_is_one_setting(ranks, host, tmp_path, goal):
    section = {} if goal is None else {"goal": goal}
    goal = goal or "exact"
    found = ranks(STAGES).run(trained, host, section, str(tmp_path))
    for rank in found:
        assert rank["failure"] is None
        assert rank["plan"] is not None
        assert {name: getattr(rank["config"], name) for name in GOALS[goal]} == GOALS[goal]
    assert any(f"enabled: goal {goal} ({MEANS[goal]}); " in line for line in found[0]["log"])
    said = [line.replace("timely_freeze", "") for rank in found for line in rank["log"]]
    assert sum("the report is written; next: tf-adapters show " in line for line in said) == 1
    if goal == "exact":
        assert not [line for line in said if re.search("freez|frozen|skip", line)]
        assert any("step 6: stable, the" in line for line in said)
        for ours, theirs in zip(found, ranks(STAGES).run(trained, host, None, ""), strict=True):
            assert ours["losses"] == theirs["losses"]
            assert same(ours["parameters"], theirs["parameters"])


def test_settings_of_your_own_are_not_a_goal(ranks, host, tmp_path):
    for rank in ranks(STAGES).run(trained, host, {"max_freeze_ratio": 0.5}, str(tmp_path)):
        assert rank["config"].goal is None
        assert rank["config"].weight_gradients == "in_place"
        assert not any("goal" in line for line in rank["log"])
