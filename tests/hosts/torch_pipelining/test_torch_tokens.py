"""Weight gradients from sampled tokens on torch's schedules: exactly what the draws say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_checks import assert_same
from torch_oracle import PLANS, REPLICATED, check_oracle
from torch_ranks import Case, pool, train

pytestmark = pytest.mark.distributed

TOKENS: dict[str, Any] = {"granularity": "token"}
DEFERRED = {**TOKENS, "weight_gradients": "deferred"}
CASES = {
    "1f1b": Case(),
    "gpipe": Case(schedule="ScheduleGPipe"),
    "interleaved": Case(schedule="ScheduleInterleaved1F1B"),
    "zero bubble": Case(schedule="ScheduleInterleavedZeroBubble"),
    "zbv": Case(schedule="ScheduleZBVZeroBubble"),
    "1f1b, checkpointing": Case(checkpoint=True),
}


def of_linear_layers(names: Any) -> set[str]:
    return {name for name in names if name.endswith(("up.weight", "down.weight")) or name == "layers.9.weight"}


@pytest.mark.parametrize("section", [TOKENS, DEFERRED], ids=["in place", "deferred"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_drawn_tokens(name: str, section: dict[str, Any]) -> None:
    case = replace(CASES[name], section=section, ratios=PLANS, steps=len(PLANS))
    ranks = pool(2).run(train, case)
    check_oracle(case, ranks)
    drawn = {name for rank in ranks for of_action in rank["draws"].values() for name in of_action}
    assert drawn == of_linear_layers(ranks[0]["parameters"] | ranks[1]["parameters"])
    for rank in ranks:
        assert rank["failure"] is None
        assert not any(names for step in rank["steps"] for names in step["masks"].values())


def test_a_ratio_of_zero_is_the_host_to_the_bit() -> None:
    case = Case(section=TOKENS, ratios=0.0)
    ours = pool(2).run(train, case)
    alone = pool(2).run(train, replace(case, section=None, ratios=None))
    assert_same(ours, alone)
    for mine in ours:
        assert not mine["draws"]


def test_a_run_draws_again_what_it_drew() -> None:
    case = Case(section=DEFERRED, ratios=0.5)
    first, second = (pool(2).run(train, case) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one["draws"].keys() == other["draws"].keys()
        for key, of_action in one["draws"].items():
            for name, drawn in of_action.items():
                assert all(map(torch.equal, drawn, other["draws"][key][name]))


def test_what_is_excluded_takes_every_token_and_what_is_limited_more_of_them() -> None:
    limits = {"freeze_exclude": ["*.up.weight"], "freeze_limits": {"*.down.weight": 0.4}}
    case = Case(section={**TOKENS, **limits}, ratios=0.8)
    ranks = pool(2).run(train, case)
    check_oracle(case, ranks)
    counts: dict[str, set[int]] = {}
    for rank in ranks:
        for of_action in rank["draws"].values():
            for name, drawn in of_action.items():
                counts.setdefault(name.rpartition(".layers")[2].lstrip("."), set()).add(int((drawn.scales > 0).sum()))
    assert not any("up" in name for name in counts)
    # Of 10 tokens 6 and 2 are kept; one is what the inputs have in common.
    assert {count for name, of_name in counts.items() if "down" in name for count in of_name} == {5}
    assert {count for name, of_name in counts.items() if "down" not in name for count in of_name} == {1}


@pytest.mark.parametrize("section", [TOKENS, DEFERRED], ids=["in place", "deferred"])
def test_a_run_is_monitored_with_draws_and_then_planned(tmp_path: Path, section: dict[str, Any]) -> None:
    section = {
        **section,
        "monitoring_steps": 10,
        "max_freeze_ratio": 0.4,
        "replan_interval": 1,
        "replan_threshold": 0.0,
    }
    case = Case(section=section, steps=16, output_dir=str(tmp_path))
    ranks = pool(2).run(train, case)
    check_oracle(case, ranks)
    for rank in ranks:
        assert rank["failure"] is None
        assert rank["steps"][-1]["phase"] == "stable"
        monitored = {step["number"] for step in rank["steps"] if step["phase"] == "monitoring_mixed"}
        assert monitored & {step for step, _, _ in rank["draws"]}
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["config"]["granularity"] == "token"
    assert report["plan"]["mean_freeze_ratio"] <= 0.4
    assert set(report["tokens"]) == {"0", "1"}
    assert all(0.0 < of_stage["kept"] <= 1.0 and of_stage["fixed"] >= 0.0 for of_stage in report["tokens"].values())
    assert max(report["plan"]["freeze_ratio"].values()) < 1.0  # no microbatch is lost


@pytest.mark.parametrize("section", [TOKENS, DEFERRED], ids=["in place", "deferred"])
@pytest.mark.parametrize("name", [name for name in REPLICATED if name.startswith("fsdp")])
def test_gradients_are_those_of_the_drawn_tokens_under_fsdp(name: str, section: dict[str, Any]) -> None:
    case = replace(REPLICATED[name], section=section, ratios=PLANS, steps=len(PLANS))  # the first one draws nothing
    ranks = pool(4).run(train, case)
    check_oracle(case, ranks)
    drawn = {name for rank in ranks for of_action in rank["draws"].values() for name in of_action}
    assert drawn == of_linear_layers(ranks[0]["parameters"] | ranks[1]["parameters"])


def test_replicas_that_reduce_in_the_backward_get_the_whole_gradients_after_the_last_one() -> None:
    case = Case(replicas="ddp", section=TOKENS, ratios=0.0, steps=3)
    ours, alone = (pool(4).run(train, replace(case, **others)) for others in ({}, {"section": None, "ratios": None}))
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["failure"] is None
        assert [step["loss"] for step in mine["steps"]] == [step["loss"] for step in theirs["steps"]]
