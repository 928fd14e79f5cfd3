"""Transformer Engine's own Python on the stand-in for its compiled extension, operation by operation next to torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
import transformer_engine_jobs as jobs
from rank_pools import fork_ranks

from tf_adapters.testing import RankPool
from tf_adapters.testing.transformer_engine_on_cpu import FOLDER

pytestmark = pytest.mark.distributed  # a process of its own


@pytest.fixture(scope="module")
def engine() -> Iterator[RankPool]:
    if importlib.util.find_spec("transformer_engine") is None and not FOLDER.exists():
        pytest.skip("no Transformer Engine here: make puts it into a folder of its own")
    with fork_ranks(1, jobs.install) as pool:
        yield pool


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_a_linear_layer_computes_torchs(engine: RankPool, dtype: torch.dtype, bound: float, bias: bool) -> None:
    [errors] = engine.run(jobs.linear_layer, dtype, bias)
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_compute_torchs_alone_and_before_a_linear_layer(engine: RankPool, kind: str, offset: float) -> None:
    for job in (jobs.norm, jobs.norm_and_linear):
        [errors] = engine.run(job, kind, offset)
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("activation", [*jobs.ACTIVATIONS, *jobs.GATES])
def test_an_mlp_computes_torchs(engine: RankPool, activation: str) -> None:
    [errors] = engine.run(jobs.mlp, activation)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("bias", [True, False])
def test_experts_compute_torchs_one_of_them_without_tokens(engine: RankPool, bias: bool) -> None:
    [errors] = engine.run(jobs.experts, bias)
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_fused_accumulation_adds_to_the_main_gradient(engine: RankPool, kind: str) -> None:
    [errors] = engine.run(jobs.fused_accumulation, kind)
    assert max(errors.values()) < 1e-6, errors


def test_attention_computes_torchs(engine: RankPool) -> None:
    [error] = engine.run(jobs.attention)
    assert error < 2e-2


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs(engine: RankPool, decoupled: bool) -> None:
    [errors] = engine.run(jobs.adam, decoupled)
    assert max(errors) < 1e-5


def test_lists_of_tensors(engine: RankPool) -> None:
    assert engine.run(jobs.lists) == [(13.0, [5.0, 12.0], [1.5, 2.0], False, True)]


def test_what_has_no_answer_names_the_kernel(engine: RankPool) -> None:
    [line] = engine.run(jobs.absent_kernel)
    assert line == "fused_attn_fwd of Transformer Engine's compiled extension has no answer on a CPU"


def test_megatron_uses_transformer_engines_layers(engine: RankPool) -> None:
    assert engine.run(jobs.megatron_layers) == [["TELayerNormColumnParallelLinear", "TERowParallelLinear"]]
