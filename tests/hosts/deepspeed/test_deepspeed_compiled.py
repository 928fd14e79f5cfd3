"""Layers compiled by Inductor on DeepSpeed's engine: the bits of the compiled host alone, in a plan's order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed_oracle import CASES
from deepspeed_ranks import Case, batch, build_engine, train
from run_checks import assert_same
from torch._dynamo.utils import counters

from tf_adapters.testing import force_plan

pytestmark = pytest.mark.distributed

EXACT: dict[str, Any] = {"goal": "exact", "max_freeze_ratio": 0.0, "weight_gradients": "deferred"}
COMPILED = {
    "layers": Case(compiled="layers"),
    "engine": Case(compiled="engine"),
    "engine, after attach": Case(compiled="late"),
    "engine, zero1": replace(CASES["zero1"], compiled="engine"),
    "layers, bf16": replace(CASES["bf16"], compiled="layers"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_exact_steps_are_the_compiled_host_to_the_bit(pools, name):
    case = replace(COMPILED[name], section=EXACT, ratios=0.0, steps=4)
    ours = pools(case.stages).run(train, case)
    alone = pools(case.stages).run(train, replace(case, section=None, ratios=None))
    assert_same(ours, alone)
    for mine in ours:
        assert mine["status"] is None
        assert mine["plan"]["ranks"] != mine["schedule"]


def test_every_layer_is_tapped_and_nothing_is_compiled_after_the_first_step(pools):
    for tapped, compiled in pools(2).run(compilations, replace(COMPILED["engine"], section=EXACT, ratios=0.0)):
        assert tapped == 1.0
        assert compiled[1:] == [compiled[0]] * (len(compiled) - 1)


def compilations(case: Case) -> tuple[float, list[int]]:
    """The share of the blocks' weights with taps, and how many graphs were compiled up to each step."""
    import tf_adapters.deepspeed

    torch._dynamo.reset()
    counters.clear()
    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    force_plan(adapter.controller, case.ratios)
    compiled = []
    for step in range(8):
        engine.train_batch(iter(batch(step, 0, case.microbatches)))
        compiled.append(counters["stats"]["unique_graphs"])
    taps = adapter.controller.pipeline.taps
    names = {name for own in adapter.controller.pipeline.parameters.values() for name in own}
    blocks = {name for name in names if name.split(".")[0] in ("1", "2", "3", "4") and is_matrix(engine, name)}
    tapped = blocks.intersection(*[of_stage.names for of_stage in taps.values()])
    adapter.detach()
    return len(tapped) / len(blocks), compiled


def is_matrix(engine: Any, name: str) -> bool:
    return engine.module.get_parameter(name).ndim == 2
