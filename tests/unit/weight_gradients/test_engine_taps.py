"""Weight gradients of Transformer Engine's layers, computed later by its own functions, on the CPU stand-in."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import engine_tap_jobs as jobs
import pytest
from rank_pools import fork_ranks
from transformer_engine_jobs import install

from tf_adapters.testing import RankPool
from tf_adapters.testing.transformer_engine_on_cpu import FOLDER
from tf_adapters.weight_gradients.reasons import NO_ROWS, NOT_CALLED, QUANTIZED

pytestmark = pytest.mark.distributed  # a process of its own

WAITING = {
    "Linear": ["bias", "weight"],
    "LayerNormLinear": ["bias", "weight"],
    "LayerNormMLP": ["fc1_bias", "fc1_weight", "fc2_bias", "fc2_weight"],
    "GroupedLinear": ["bias0", "bias1", "bias2", "weight0", "weight1", "weight2"],
}


@pytest.fixture(scope="module")
def engine() -> Iterator[RankPool]:
    if importlib.util.find_spec("transformer_engine") is None and not FOLDER.exists():
        pytest.skip("no Transformer Engine here: make puts it into a folder of its own")
    with fork_ranks(1, install) as pool:
        yield pool


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", list(WAITING))
def test_gradients_are_the_layers_own_to_the_bit(engine: RankPool, kind: str, fused: bool, bias: bool) -> None:
    [(differ, names, same)] = engine.run(jobs.check, kind, fused, bias)
    assert differ == []
    assert names == [name for name in WAITING[kind] if bias or "weight" in name]
    assert same


def test_the_checked_step_knows_which_layers_were_called(engine: RankPool) -> None:
    assert engine.run(jobs.checked_step) == [{"unused.weight": NOT_CALLED, "unused.bias": NOT_CALLED}]


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_a_layer_in_fp8_is_deferred_and_not_sampled(engine: RankPool, recipe: str) -> None:
    assert engine.run(jobs.quantizing_step, recipe, False) == [{}]
    assert engine.run(jobs.quantizing_step, recipe, True) == [{"used.weight": NO_ROWS, "used.bias": NO_ROWS}]


def test_a_recipe_without_a_test_is_left_to_the_host(engine: RankPool) -> None:
    found = engine.run(jobs.quantizing_step, "MXFP8BlockScaling", False)
    assert found == [{"used.weight": QUANTIZED, "used.bias": QUANTIZED}]


def test_a_first_microbatch_writes_over_no_others(engine: RankPool) -> None:
    assert engine.run(jobs.first_microbatch_last)[0] < 1e-5
