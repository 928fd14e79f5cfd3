"""Layers compiled by Inductor, with taps inside: the bits of the compiled host alone, in a plan's order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_ranks import Case, attached, pool, train

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
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["failure"] is None
        assert mine["plan"]["ranks"] != mine["schedule"]
        assert [step["loss"] for step in mine["steps"]] == [step["loss"] for step in theirs["steps"]]
        for weight, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][weight], value), weight


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "fsdp of blocks, resharded"])
def test_every_block_is_tapped_and_nothing_is_compiled_after_the_first_step(name: str) -> None:
    section = {**EXACT, "warmup_steps": 2, "monitoring_steps": 4, "progressive_steps": 2}
    case = replace(CASES[name], section=section, microbatches=8)
    for tapped, compiled, failure in pool(4 if case.replicas else 2).run(compilations, case):
        assert failure is None
        assert tapped == 1.0
        assert compiled[1:] == [compiled[0]] * (len(compiled) - 1)


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
