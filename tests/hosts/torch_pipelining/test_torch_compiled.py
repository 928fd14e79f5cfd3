"""Layers compiled by Inductor, with taps inside: the bits of the compiled host alone, in a plan's order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_checks import assert_same
from torch_oracle import PLANS, check_oracle
from torch_ranks import Case, attached, pool, train

from tf_adapters.report.schema import Report

pytestmark = pytest.mark.distributed

EXACT: dict[str, Any] = {"goal": "exact", "max_freeze_ratio": 0.0}
CASES = {
    "1f1b": Case(compiled=True),
    "interleaved": Case(wrapped=True, schedule="ScheduleInterleaved1F1B"),
    "1f1b, checkpointing": Case(compiled=True, checkpoint=True),
    "1f1b, bfloat16": Case(wrapped=True, dtype=torch.bfloat16),
    "fsdp": Case(compiled=True, replicas="fsdp"),
    "fsdp of blocks, resharded": Case(wrapped=True, replicas="fsdp nested"),
    "fsdp of blocks, mixed": Case(wrapped=True, replicas="fsdp mixed"),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_steps_are_the_compiled_host_to_the_bit(name: str) -> None:
    case = replace(CASES[name], section=EXACT, ratios=0.0, steps=4)
    ranks = pool(4 if case.replicas else 2)
    ours = ranks.run(train, case)
    alone = ranks.run(train, replace(case, section=None, ratios=None))
    assert_same(ours, alone)
    for mine in ours:
        assert mine["failure"] is None
        assert mine["plan"]["ranks"] != mine["schedule"]


def test_gradients_from_sampled_tokens_of_compiled_layers_are_those_of_the_draws() -> None:
    section = {"granularity": "token", "weight_gradients": "deferred"}
    case = replace(CASES["1f1b"], section=section, ratios=PLANS, steps=len(PLANS))
    ranks = pool(2).run(train, case)
    check_oracle(case, ranks)
    drawn = {name for rank in ranks for of_action in rank["draws"].values() for name in of_action}
    assert {"layers.3.up.weight", "layers.6.down.weight"} <= drawn
    assert [rank["failure"] for rank in ranks] == [None, None]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "fsdp of blocks, resharded"])
def test_every_block_is_tapped_and_nothing_is_compiled_after_the_first_step(name: str, tmp_path: Path) -> None:
    section = {**EXACT, "warmup_steps": 2, "monitoring_steps": 4, "progressive_steps": 2}
    case = replace(CASES[name], section=section, microbatches=8, output_dir=str(tmp_path))
    for tapped, compiled, failure in pool(4 if case.replicas else 2).run(compilations, case):
        assert failure is None
        assert tapped == 1.0
        assert compiled[1:] == [compiled[0]] * (len(compiled) - 1)
    found = Report.read(tmp_path / "timely_freeze" / "report.json").compilations
    assert found["first_step"] > 0
    assert found["later"] == 0


def compilations(case: Case) -> tuple[float, list[int], str | None]:
    """The share of the blocks' weights with taps, how many graphs were compiled up to each step, and the failure."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    run = attached(case)
    controller = run.adapter.controller
    compiled = []
    for step in range(14):
        run.train_step(step)
        compiled.append(counters["stats"]["unique_graphs"])
    run.adapter.finish_step()
    weights = [name for names in controller.pipeline.parameters.values() for name in names]
    blocks = [name for name in weights if name.endswith(("up.weight", "down.weight"))]
    tapped = set().union(*(taps.names for taps in controller.pipeline.taps.values()))
    failure = controller.state.failure
    run.adapter.detach()
    return len(tapped.intersection(blocks)) / len(blocks), compiled, failure
