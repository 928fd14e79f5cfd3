"""Code of users that is hostile to deferred weight gradients, in Megatron-Core's blocks: the host's bits, or a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import megatron_ranks
import pytest
import torch
import user_layers
from hostile import WIDTH, Situation, check
from hostile_runs import RATIOS, SECTION, on_ranks, trained
from hostile_situations import SITUATIONS
from megatron_ranks import (
    BATCH,
    CONTEXT,
    Case,
    build_chunks,
    build_optimizer,
    by_name,
    initialize,
    main_gradient,
    mean_loss,
    run_batch,
    setup_engine,
    teardown,
    values,
    zero_gradients,
)
from rank_pools import fork_ranks, rank_pool
from torch import nn

from tf_adapters.testing import RankPool, force_plan
from tf_adapters.testing.transformer_engine_on_cpu import available

pytestmark = pytest.mark.distributed

CASE = Case(layers=2, beside="hostile")
NAMES = (
    *("nothing hostile", "stolen gradient", "gradient changed in place", "gradient changed through numpy"),
    *("gradient changed by a hook", "norm in place next to a branch", "static input", "static input through numpy"),
    *(name for name in SITUATIONS if name.endswith("in the forward, from step 3")),
    *("static gradient", "workspace", "workspace of inputs", "penalty in the forward", "no gradient", "weight hook"),
    *("accumulated hook", "two checkpoints", "zero first gradient", "zero first gradient, penalty", "linear replaced"),
)
"""Situations that can occur here. The loss has one gradient only: Megatron's cross entropy computes it in place."""

OF_TORCH = ("zero first gradient", "linear replaced")
KINDS: dict[str, Sequence[str]] = {"torch": NAMES, "local": [name for name in NAMES if name not in OF_TORCH]}
KINDS["Transformer Engine"] = [n for n in KINDS["local"] if "penalty" not in n and "in the forward" not in n]
PAIRS = [(kind, name) for kind, names in KINDS.items() for name in names]


def of_torch() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def of_megatron() -> nn.Module:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = megatron_ranks.transformer_config(CASE)
    return ColumnParallelLinear(WIDTH, WIDTH, config=config, init_method=config.init_method, skip_bias_add=False)


def of_engine() -> nn.Module:
    import transformer_engine.pytorch as te

    return te.Linear(WIDTH, WIDTH)


LAYERS: dict[str, Callable[[], nn.Module]] = {"torch": of_torch, "local": of_megatron, "Transformer Engine": of_engine}


class Run:
    """One rank's part of a run of a situation, which every MLP has next to it."""

    def __init__(self, situation: Situation, section: dict[str, Any] | None, ratio: float | None) -> None:
        import tf_adapters.megatron

        self.situation = situation
        initialize(CASE)
        with patch.dict(user_layers.LAYERS, {"hostile": situation.block}):
            self.chunks = build_chunks(CASE)
        situation.prepare()
        self.optimizer = build_optimizer(CASE, self.chunks)
        self.adapter: Any = None
        if section is not None:
            count = CASE.microbatches
            self.adapter = tf_adapters.megatron.attach(self.chunks, self.optimizer, section, num_microbatches=count)
        if ratio is not None:
            force_plan(self.adapter.controller, ratio)
        situation.around.enter_context(patch.object(megatron_ranks, "mean_loss", self._loss))

    def step(self, number: int) -> dict[str, Any]:
        self.situation.begin(number)
        zero_gradients(self.chunks, self.optimizer)
        run_batch(CASE, self.chunks, number, range(CASE.microbatches))
        gradients = by_name(CASE, self.chunks, main_gradient)
        self.optimizer.step()
        self.situation.end()
        found = {f"gradient of {name}": gradient for (_, name), gradient in gradients.items()}
        return found | {name: value for (_, name), value in by_name(CASE, self.chunks, values).items()}

    def _loss(self, per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, figures = mean_loss(per_token)
        return self.situation.loss(loss, per_token), figures


def train(kind: str, name: str, section: dict[str, Any] | None = None, ratio: float | None = None) -> dict[str, Any]:
    """Run a situation on this rank, with linear layers of a kind."""
    situation = SITUATIONS[name](rows=CONTEXT * BATCH, layer=LAYERS[kind])
    return trained(situation, partial(Run, situation, section, ratio))


@cache
def engine() -> RankPool:
    """Two ranks with Transformer Engine; they end with pytest."""
    return fork_ranks(2, setup_engine, teardown)


def pool_of(kind: str) -> RankPool:
    return engine() if kind == "Transformer Engine" else rank_pool("megatron", 2)


@cache
def alone(kind: str, name: str) -> Any:
    """The host alone, on both ranks."""
    ranks = on_ranks(pool_of(kind), train, kind, name)
    assert not any(rank["raised"] for rank in ranks), ranks[0]["raised"]
    return ranks


@pytest.mark.parametrize("ratio", RATIOS.values(), ids=RATIOS)
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_bits_are_the_hosts_or_a_line_says_so(kind: str, name: str, ratio: float | None, tmp_path: Any) -> None:
    if kind == "Transformer Engine" and not available():
        pytest.skip("no Transformer Engine here: make puts it into a folder of its own")
    section = {**SECTION, "output_dir": str(tmp_path)}
    check(SITUATIONS[name](), on_ranks(pool_of(kind), train, kind, name, section, ratio), alone(kind, name))
