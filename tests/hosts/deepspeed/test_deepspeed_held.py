"""What a whole step froze keeps its value and state however DeepSpeed's optimizer has partitioned the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import deepspeed_ranks
import pytest
import torch
from deepspeed_ranks import Case, batch
from torch import nn

from tf_adapters.errors import UnsupportedError
from tf_adapters.testing import force_plan

pytestmark = pytest.mark.distributed
MICROBATCHES = 4
ZERO1 = {"zero_optimization": {"stage": 1}}
SMALL = {"reduce_bucket_size": 100, "allgather_bucket_size": 100, "overlap_comm": True}
BF16 = {"bf16": {"enabled": True}, **ZERO1}


def zero1(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 1, **settings}}


@dataclass(frozen=True)
class Partitioned:
    """A config that says how parameters are partitioned, and parameter groups: by endings of names, and the rest."""

    config: dict[str, Any] = field(default_factory=lambda: ZERO1)
    groups: tuple[str, ...] = ()

    def engine(self, freezes: bool) -> Any:
        import deepspeed
        from deepspeed.pipe import LayerSpec, PipelineModule

        deepspeed_ranks.seed(7)
        layers = [deepspeed_ranks.Embed, *[deepspeed_ranks.Block] * 4, deepspeed_ranks.Head]
        module = PipelineModule(
            layers=[LayerSpec(layer) for layer in layers],
            num_stages=2,
            loss_fn=deepspeed_ranks.loss_fn,
            partition_method="uniform",
            seed_layers=True,
            seed_fn=deepspeed_ranks.seed,
        )
        config = Case(config=self.config, section={} if freezes else None).ds_config()
        engine = deepspeed.initialize(model=module, model_parameters=self.grouped(module), config=config)[0]
        deepspeed_ranks.ENGINES.append(engine)
        return engine

    def grouped(self, module: nn.Module) -> list[Any]:
        named = dict(module.named_parameters())
        if not self.groups:
            return list(named.values())
        chosen = [[n for n in named if n.endswith(ending)] for ending in self.groups]
        others = [n for n in named if not n.endswith(self.groups)]
        return [
            {"params": [named[n] for n in names], "weight_decay": 0.1 * index, "name": str(index)}
            for index, names in enumerate([*chosen, others])
            if names
        ]


KEYS = {
    "round robin": (zero1(round_robin_gradients=True), ZERO1),
    "round robin, small buckets": (zero1(round_robin_gradients=True, **SMALL), ZERO1),
    "no contiguous gradients": (zero1(contiguous_gradients=False), ZERO1),
    "small buckets": (zero1(**SMALL), ZERO1),
    "no partitions gathered": (zero1(allgather_partitions=False, reduce_scatter=False), ZERO1),
    "bf16 gradients": ({**BF16, "data_types": {"grad_accum_dtype": "bf16"}}, None),
    "bf16 gradients, round robin": (
        {"bf16": {"enabled": True}, **zero1(round_robin_gradients=True), "data_types": {"grad_accum_dtype": "bf16"}},
        {**BF16, "data_types": {"grad_accum_dtype": "bf16"}},
    ),
    "bf16": ({**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, None),
    "bf16 immediate": (
        {**BF16, "bf16": {"enabled": True, "immediate_grad_update": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "fp32 gradients apart": ({**ZERO1, "data_types": {"grad_accum_dtype": "fp32"}}, ZERO1),
}
"""A config, and another of the same training that partitions plainly."""
GROUPS = {"one group": (), "decay and none": ("bias",), "three groups": ("bias", "norm.weight")}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("key", KEYS)
def test_what_a_whole_step_froze_stays_and_all_else_is_as_in_a_plain_partition(pools, key, groups):
    """The same parameters as in a plain partition also mean that momentum and variance stayed where they belong."""
    config, plain = KEYS[key]
    ranks = pools(4).run(train, Partitioned(config, GROUPS[groups]))
    assert sum(rank["held"] for rank in ranks) > 20
    assert [rank["moved"] for rank in ranks] == [[]] * 4
    for one, other in ((0, 1), (2, 3)):  # replicas
        assert_equal(ranks[one]["parameters"], ranks[other]["parameters"], exact=True)
    if plain is not None:
        for rank, expected in zip(ranks, pools(4).run(train, Partitioned(plain, GROUPS[groups])), strict=True):
            assert_equal(rank["parameters"], expected["parameters"], exact=False)


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], exact: bool) -> None:
    for name, value in expected.items():
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(actual[name], value, **tolerance, msg=lambda text, n=name: f"{n}: {text}")


def train(case: Partitioned) -> dict[str, Any]:
    import tf_adapters.deepspeed

    engine = case.engine(freezes=True)
    controller = tf_adapters.deepspeed.attach(engine).controller
    force_plan(controller, 0.8)
    named, held, moved = dict(engine.module.named_parameters()), 0, []
    for step in range(6):
        masks = [controller.frozen_parameters(controller.step, engine.stage_id, m) for m in range(MICROBATCHES)]
        frozen = set.intersection(*map(set, masks))
        before = {name: named[name].detach().clone() for name in frozen}
        engine.train_batch(iter(batch(step, engine.grid.data_parallel_id, MICROBATCHES)))
        held += len(frozen)
        moved += [(step, name) for name, value in before.items() if not torch.equal(value, named[name].detach())]
    return {"held": held, "moved": moved, "parameters": deepspeed_ranks.parameters_of(engine)}


@pytest.mark.parametrize("key", ["round robin", "bf16", "small buckets"])
def test_what_stability_checks_read_is_the_parameters_own_part(pools, key):
    """Over all replicas the pieces are the whole parameter, each value once."""
    ranks = pools(4).run(pieces, Partitioned(KEYS[key][0], GROUPS["decay and none"]))
    for one, other in ((0, 1), (2, 3)):
        for name, value in ranks[one]["parameters"].items():
            whole = torch.full((value.numel(),), float("nan"))
            for begin, part in (*ranks[one]["pieces"][name], *ranks[other]["pieces"][name]):
                assert whole[begin : begin + part.numel()].isnan().all()
                whole[begin : begin + part.numel()] = part
            torch.testing.assert_close(whole.view(value.shape).to(value.dtype), value, rtol=0.0, atol=0.0)


def pieces(case: Partitioned) -> dict[str, Any]:
    import tf_adapters.deepspeed

    engine = case.engine(freezes=True)
    adapter = tf_adapters.deepspeed.attach(engine)
    engine.train_batch(iter(batch(0, engine.grid.data_parallel_id, MICROBATCHES)))
    held, stage = adapter.controller.pipeline.held_values, engine.stage_id
    return {
        "parameters": deepspeed_ranks.parameters_of(engine),
        "pieces": {
            name: [(piece.part[0], piece.values.detach().clone()) for piece in held(stage, name)]
            for name, _ in engine.module.named_parameters()
        },
    }


def test_gradients_that_lie_elsewhere_than_values_are_refused_on_all_ranks(pools):
    lines = pools(4).run(attach_to_another_layout)
    assert len(set(lines)) == 1
    assert "DeepSpeedZeroOptimizer keeps the gradient of 0.weight at another place than its values" in lines[0]


def attach_to_another_layout() -> str:
    import tf_adapters.deepspeed

    engine = Partitioned().engine(freezes=True)
    if torch.distributed.get_rank() == 0:
        starts = engine.optimizer.grad_partition_insertion_offset[0][0]
        starts[engine.optimizer.get_param_id(engine.module.get_parameter("0.weight"))] += 1
    with pytest.raises(UnsupportedError) as caught:
        tf_adapters.deepspeed.attach(engine)
    return str(caught.value)
