"""Tied modules on DeepSpeed: what several stages hold together, and what each of them holds alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed_ranks
import pytest
import torch
from deepspeed_ranks import CONTEXT, VOCABULARY, WIDTH, Block, Case, Embed, Head, batch, loss_fn
from torch import nn

from tf_adapters.testing import force_plan

pytestmark = pytest.mark.distributed
MICROBATCHES, STEPS = 4, 12


class Table(nn.Module):
    """Word embeddings, which are tied, and positions and a scale, which are or are not."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.word(tokens) + self.position(torch.arange(tokens.shape[1]))) * self.scale


def read_out(table: Table, x: torch.Tensor) -> torch.Tensor:
    return (x + table.position.weight.sum(0)) * table.scale @ table.word.weight.t()


@dataclass(frozen=True)
class Tied:
    """A model with a tied module, of which ``attributes`` are tied; ``repeated``: used twice on each stage."""

    attributes: str | list[str]
    repeated: bool = False

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        if self.repeated:
            tied = [TiedLayerSpec("tied", Block, tied_weight_attr=self.attributes) for _ in range(4)]
            return [LayerSpec(Embed), *tied, LayerSpec(Head)]
        ends = [{}, {"forward_fn": read_out}]
        first, last = (TiedLayerSpec("tied", Table, tied_weight_attr=self.attributes, **end) for end in ends)
        return [first, LayerSpec(Block), LayerSpec(Block), last]


MODELS = {
    "one attribute": Tied("word.weight"),
    "a list of attributes": Tied(["word.weight", "scale"]),
    "twice on each stage": Tied(["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"], True),
}


@pytest.mark.parametrize("weight_gradients", ["in_place", "deferred"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_a_tied_weight_is_held_where_all_its_stages_froze_it(pools, model, zero, weight_gradients):
    tied = MODELS[model]
    ranks = pools(2).run(train, tied, zero, weight_gradients)
    attributes = [tied.attributes] if isinstance(tied.attributes, str) else tied.attributes
    shared = {f"tied_modules.tied.{attribute}" for attribute in attributes}
    learned, kept_alone = set(), set()
    for step in range(STEPS):
        frozen = [rank["frozen"][step] for rank in ranks]
        for rank, here, there in zip(ranks, frozen, reversed(frozen), strict=True):
            held = {name for name in here if name not in shared or name in there}
            assert not held & rank["moved"][step], f"step {step}"
            learned |= (here - held) & rank["moved"][step]
            kept_alone |= {name for name in held - there if name.startswith("tied")}
    assert learned, "no step froze a tied weight on one stage only"
    assert learned <= shared
    assert bool(kept_alone) is (not tied.repeated)  # parameters of a tied module that are a stage's own
    for name in shared:
        assert torch.equal(ranks[0]["parameters"][name], ranks[1]["parameters"][name]), name


@pytest.mark.parametrize("model", MODELS)
def test_the_report_counts_a_tied_weight_where_all_its_stages_froze_it(pools, model):
    ranks = pools(2).run(train, MODELS[model], 0, "in_place")
    for stage, rank in enumerate(ranks):
        names = {name for masks in rank["masks"] for mask in masks[stage] for name in mask}
        for name in names:
            both = name in ranks[0]["shared"]
            counted = [all(name in mask for mask in (at if both else (at[stage],))) for at in rank["by_microbatch"]]
            assert rank["reported"].get(name, 0.0) == pytest.approx(sum(counted) / len(counted)), name


def train(model: Tied, zero: int, weight_gradients: str) -> dict[str, Any]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import tf_adapters.deepspeed

    deepspeed_ranks.seed(7)
    module = PipelineModule(
        layers=model.layers(), num_stages=2, loss_fn=loss_fn, partition_method="uniform", seed_fn=deepspeed_ranks.seed
    )
    section = {"weight_gradients": weight_gradients, "warmup_steps": 0, "monitoring_steps": 2, "progressive_steps": 0}
    config = Case(config={"zero_optimization": {"stage": zero}}, section=section).ds_config()
    engine = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
    deepspeed_ranks.ENGINES.append(engine)
    controller = tf_adapters.deepspeed.attach(engine).controller
    force_plan(controller, 0.9)
    named = dict(engine.module.named_parameters())
    shared = {id(weight) for weight, _ in engine.module.get_tied_weights_and_groups()}
    result: dict[str, Any] = {"frozen": [], "moved": [], "masks": [], "by_microbatch": []}
    result["shared"] = {name for name, parameter in named.items() if id(parameter) in shared}
    for step in range(STEPS):
        masks = [
            [set(controller.frozen_parameters(controller.step, stage, m)) for m in range(MICROBATCHES)]
            for stage in (0, 1)
        ]
        before = deepspeed_ranks.parameters_of(engine)
        engine.train_batch(iter(batch(step, 0, MICROBATCHES)))
        result["frozen"].append(set.intersection(*masks[engine.stage_id]))
        result["moved"].append({n for n, value in before.items() if not torch.equal(value, named[n].detach())})
        result["masks"].append(masks)
        result["by_microbatch"] += zip(*masks, strict=True)
    result["reported"] = controller._tally.parameter_freeze_ratio().get(engine.stage_id, {})
    return result | {"parameters": deepspeed_ranks.parameters_of(engine)}
