"""Code of users that is hostile to deferred weight gradients, on DeepSpeed: the host's bits, or a line."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from deepspeed_ranks import ENGINES, PLAIN
from hostile import WIDTH, Situation, check, copies
from hostile_runs import MICROBATCHES, RATIOS, SECTION, on_ranks, trained
from hostile_situations import SITUATIONS
from rank_pools import rank_pool

from tf_adapters.testing import force_plan

pytestmark = pytest.mark.distributed

ELSEWHERE = ("type is Linear", "step in the backward", "penalty in the first of two batches")
"""Situations that have nothing to do with the host."""

REFUSED = [
    name
    for name in SITUATIONS
    if "in the forward" not in name
    and name.startswith(("gradient in the loss", "gradient of a weight", "backward with inputs", "penalty"))
]
"""The engine raises an error if the loss function takes a gradient, with or without us."""

WRONG = "stolen gradient"
"""The engine alone computes wrong gradients: the parameter takes the engine's receive buffer as its gradient."""

NAMES = [name for name in SITUATIONS if name not in (*ELSEWHERE, *REFUSED, WRONG)]


class Run:
    """One rank's part of a run of a situation."""

    def __init__(self, situation: Situation, section: dict[str, Any] | None, ratio: float | None) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        import tf_adapters.deepspeed

        self.situation = situation
        blocks = [situation.block() for _ in range(2)]
        situation.prepare()
        module = PipelineModule(blocks, num_stages=2, loss_fn=self._loss, partition_method="uniform")
        config = dict(PLAIN) if section is None else {**PLAIN, "timely_freeze": section}
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
        ENGINES.append(self.engine)
        self.engine.basic_optimizer.register_step_pre_hook(self._record)
        self.adapter: Any = None if section is None else tf_adapters.deepspeed.attach(self.engine)
        if ratio is not None:
            force_plan(self.adapter.controller, ratio)

    def step(self, number: int) -> dict[str, Any]:
        self.situation.begin(number)
        self.engine.train_batch(data(self.situation, number))
        self.situation.end()
        return self.gradients | copies(self._named())

    def _named(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.engine.module.named_parameters())

    def _record(self, *_: Any) -> None:
        self.gradients = copies({f"gradient of {name}": p.grad for name, p in self._named().items()})

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.situation.loss(torch.nn.functional.mse_loss(output, target), output)


def data(situation: Situation, number: int) -> Any:
    """The microbatches of a batch: a pure function of its number."""
    generator = torch.Generator().manual_seed(number)
    shape = (*situation.shape, WIDTH)
    pairs = [[torch.randn(shape, generator=generator) for _ in range(2)] for _ in range(MICROBATCHES)]
    return iter([(inputs, target) for inputs, target in pairs])


def train(name: str, section: dict[str, Any] | None = None, ratio: float | None = None) -> dict[str, Any]:
    """Run a situation on this rank."""
    situation = SITUATIONS[name]()
    return trained(situation, partial(Run, situation, section, ratio))


@cache
def alone(name: str) -> Any:
    """The host alone, on both ranks."""
    ranks = on_ranks(rank_pool("deepspeed", 2), train, name)
    assert not any(rank["raised"] for rank in ranks), ranks[0]["raised"]
    return ranks


@pytest.mark.parametrize("ratio", RATIOS.values(), ids=RATIOS)
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_the_hosts_or_a_line_says_so(name: str, ratio: float | None, tmp_path: Any) -> None:
    section = {**SECTION, "output_dir": str(tmp_path)}
    ours = on_ranks(rank_pool("deepspeed", 2), train, name, section, ratio)
    check(SITUATIONS[name](), ours, alone(name))
