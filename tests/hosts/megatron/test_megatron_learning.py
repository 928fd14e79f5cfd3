"""What freezing costs in learning, where a fused kernel adds each microbatch's weight gradients to ``main_grad``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from megatron_oracle import FUSED
from megatron_ranks import Case, setup_engine, start, teardown, train_step
from rank_pools import fork_ranks

from tf_adapters.testing import RankPool
from tf_adapters.testing.transformer_engine_on_cpu import available

pytestmark = pytest.mark.distributed

AUTO = {
    "max_freeze_ratio": "auto",
    "monitoring_steps": 6,
    "monitoring_precision": 1e-9,
    "progressive_steps": 1,
    "weight_gradients": "deferred",
    "granularity": "token",
}


def learnt(case: Case) -> dict[int, tuple[float, float]]:
    """The share of signal of each stage, and the noise of drawing its tokens."""
    chunks, optimizer, adapter = start(case)
    for step in range(9):
        train_step(case, chunks, optimizer, step)
    state = adapter.controller.state
    assert state.failure is None
    assert state.plan.frontier, state.notes
    stages: dict[int, Any] = state.measurement.learning.stages
    adapter.detach()
    return {stage: (of.signal, of.draws) for stage, of in stages.items()}


def same_with_a_fused_kernel(ranks: RankPool, case: Case) -> None:
    for plain, fused in zip(ranks.run(learnt, case), ranks.run(learnt, replace(case, model=FUSED)), strict=True):
        assert plain.keys() == fused.keys()
        for stage, values in plain.items():
            assert fused[stage] == pytest.approx(values, rel=1e-3)


def test_megatrons_layers(megatron, tmp_path):
    same_with_a_fused_kernel(megatron(2), Case(section=AUTO, output_dir=str(tmp_path)))


@pytest.fixture(scope="module")
def engine() -> Iterator[RankPool]:
    if not available():
        pytest.skip("transformer-engine is not installed")
    with fork_ranks(2, setup=setup_engine, teardown=teardown) as pool:
        yield pool


def test_transformer_engines_layers(engine, tmp_path):
    same_with_a_fused_kernel(engine, Case(section=AUTO, engine=True, output_dir=str(tmp_path)))
