"""Layers as users write them, on DeepSpeed: the host's bits with nothing frozen, else the oracle's gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed_ranks import ENGINES, PLAIN, SECTION
from rank_pools import rank_pool, seed
from user_layers import (
    ENGINE_MODELS,
    LAYERS,
    MODELS,
    WIDTH,
    check_nothing_is_promised,
    engine_ranks,
    layer_kinds,
    samples,
)

from tf_adapters.testing import RankPool, force_plan, relative_error

pytestmark = pytest.mark.distributed

STEPS, MICROBATCHES = 6, 4
NAMES = [name for name in MODELS if name != "complex"]  # whose gradients the engine itself refuses to reduce
NOTHING: dict[str, Any] = {"max_freeze_ratio": 0.0}
DEFERRED: dict[str, Any] = {"weight_gradients": "deferred"}
TOKENS: dict[str, Any] = {"granularity": "token"}


def train(name: str, section: dict[str, Any] | None, ratio: float | None, output_dir: str) -> dict[str, Any]:
    """One rank's part of a few steps; the gradients are those that reach the optimizer."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import tf_adapters.deepspeed

    seed(3)
    module = PipelineModule(
        [LayerSpec(LAYERS[layer]) for layer in layer_kinds(name)],
        num_stages=2,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
        seed_layers=True,
        base_seed=5,
    )
    config = dict(PLAIN)
    if section is not None:
        config["timely_freeze"] = {**SECTION, "output_dir": output_dir, **section}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    ENGINES.append(engine)
    adapter = None if section is None else tf_adapters.deepspeed.attach(engine)
    if ratio is not None:
        assert adapter is not None
        force_plan(adapter.controller, ratio)
    named = dict(engine.module.named_parameters())
    gradients: list[dict[str, torch.Tensor]] = []
    engine.basic_optimizer.register_step_pre_hook(
        lambda *_: gradients.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()}
        )
    )
    result: dict[str, Any] = {"losses": [], "masks": [], "weights": []}
    for step in range(STEPS):
        result["weights"].append({n: p.detach().clone() for n, p in named.items()})
        if adapter is not None:
            masks = adapter.controller.frozen_parameters
            result["masks"].append([masks(adapter.controller.step, engine.stage_id, m) for m in range(MICROBATCHES)])
        result["losses"].append(float(engine.train_batch(iter(samples(name, step, MICROBATCHES)))))
    result |= {"gradients": gradients, "parameters": {n: p.detach().clone() for n, p in named.items()}}
    if adapter is not None:
        state = adapter.controller.state
        result |= {"notes": state.notes, "failure": state.failure, "plan": state.plan}
        result["shares"] = dict(state.taps.shares) if state.taps else {}
        adapter.detach()
    return result


def expected(name: str, step: int, weights: dict[str, torch.Tensor], masks: list[Any]) -> dict[str, torch.Tensor]:
    """The mean over microbatches of the gradients that the masks leave, of the whole model in one process."""
    layers = torch.nn.ModuleDict({str(index): LAYERS[layer]() for index, layer in enumerate(layer_kinds(name))})
    layers.load_state_dict(weights, strict=False)
    total = {n: torch.zeros_like(p) for n, p in layers.named_parameters()}
    for microbatch, (x, target) in enumerate(samples(name, step, MICROBATCHES)):
        layers.zero_grad()
        for layer in layers.values():
            x = layer(x)
        torch.nn.functional.mse_loss(x, target).backward()
        for n, p in layers.named_parameters():
            if n not in masks[microbatch] and p.grad is not None:
                total[n] += p.grad / MICROBATCHES
    return total


@pytest.mark.parametrize("section", [{}, DEFERRED, TOKENS], ids=["in place", "deferred", "tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_frozen_is_the_host_to_the_bit(name: str, section: dict[str, Any], tmp_path: Any) -> None:
    check_bits(name, section, str(tmp_path), rank_pool("deepspeed", 2))


def check_bits(name: str, section: dict[str, Any], output_dir: str, pool: RankPool) -> list[dict[str, Any]]:
    alone = pool.run(train, name, None, None, output_dir)
    ours: list[dict[str, Any]] = pool.run(train, name, {**NOTHING, **section}, 0.0, output_dir)
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["failure"] is None
        assert mine["losses"] == theirs["losses"]
        for weight, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][weight], value), weight
    return ours


@pytest.mark.parametrize("section", [{}, DEFERRED], ids=["in place", "deferred"])
@pytest.mark.parametrize("name", NAMES)
def test_masks_leave_the_oracles_gradients(name: str, section: dict[str, Any], tmp_path: Any) -> None:
    check_masks(name, section, str(tmp_path), rank_pool("deepspeed", 2))


def check_masks(name: str, section: dict[str, Any], output_dir: str, pool: RankPool) -> None:
    ranks = pool.run(train, name, section, 0.6, output_dir)
    for step in range(STEPS):
        weights = ranks[0]["weights"][step] | ranks[1]["weights"][step]
        masks = [(*first, *second) for first, second in zip(*(rank["masks"][step] for rank in ranks), strict=True)]
        oracle = pool.run(expected, name, step, weights, masks)[0]
        for rank in ranks:
            for weight, gradient in rank["gradients"][step].items():
                assert relative_error(gradient, oracle[weight]) <= 1e-5, (step, weight)
    assert any(names for rank in ranks for step in rank["masks"] for names in step)


@pytest.fixture(scope="module")
def with_engine() -> Iterator[RankPool]:
    with engine_ranks("deepspeed") as pool:
        yield pool


@pytest.mark.parametrize("section", [{}, DEFERRED, TOKENS], ids=["in place", "deferred", "tokens"])
@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_transformer_engines_layers_keep_the_hosts_bits(
    with_engine: RankPool, name: str, section: dict[str, Any], tmp_path: Any
) -> None:
    for rank in check_bits(name, section, str(tmp_path), with_engine):
        assert min(rank["shares"].values(), default=1.0) >= 0.8


@pytest.mark.parametrize("section", [{}, DEFERRED], ids=["in place", "deferred"])
@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_masks_on_transformer_engines_layers_leave_the_oracles_gradients(
    with_engine: RankPool, name: str, section: dict[str, Any], tmp_path: Any
) -> None:
    check_masks(name, section, str(tmp_path), with_engine)


def test_layers_that_are_left_to_the_host_are_named_with_the_reason(tmp_path: Any) -> None:
    ranks = rank_pool("deepspeed", 2).run(train, "energies", {**NOTHING, **DEFERRED}, 0.0, str(tmp_path))
    for rank in ranks:
        assert any("0.down.weight, 0.up.weight: a gradient of its gradient is taken" in n for n in rank["notes"])


def copied(output_dir: str) -> bool:
    """Whether a copy that is made after attaching computes with its own weights."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import tf_adapters.deepspeed

    seed(3)
    layers = [LayerSpec(torch.nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
    section = {**SECTION, **DEFERRED, "output_dir": output_dir}
    config = {**PLAIN, "timely_freeze": section}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    ENGINES.append(engine)
    adapter = tf_adapters.deepspeed.attach(engine)
    assert adapter is not None
    (layer, *_) = [m for m in engine.module.modules() if isinstance(m, torch.nn.Linear)]
    other = copy.deepcopy(layer)
    for parameter in other.parameters():
        parameter.data.zero_()
    engine.train_batch(iter(samples("energies", 0, MICROBATCHES)))
    zero = not other(torch.ones(1, WIDTH)).any()
    adapter.detach()
    return zero and type(layer) is torch.nn.Linear


def test_a_copy_made_after_attaching_has_its_own_weights(tmp_path: Any) -> None:
    assert rank_pool("deepspeed", 2).run(copied, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("section", [DEFERRED, TOKENS, {**DEFERRED, **TOKENS}], ids=["deferred", "tokens", "both"])
@pytest.mark.parametrize("name", ["no taps", "no taps on a stage"])
def test_where_nothing_has_a_tap_nothing_is_promised(name: str, section: dict[str, Any], tmp_path: Any) -> None:
    ranks = rank_pool("deepspeed", 2).run(train, name, section, None, str(tmp_path))
    check_nothing_is_promised(name, ranks)
