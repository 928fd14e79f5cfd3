"""What a stability check reads, on every way that a host keeps its parameters, against copies of the whole model.

The contract has the plain cases; here are shards, fp32 masters of bf16 weights, and tensor and expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tf_adapters.selection.sampling import sample_indices
from tf_adapters.selection.stability import StabilityState

pytestmark = pytest.mark.distributed

SEED = 3
SECTION = {"method": "timely+apf", "stability_check_interval": 1, "seed": SEED}
Where = Callable[[int, str, tuple[int, ...], int], torch.Tensor | None]
"""A piece in a copy of the model: by stage, name, part and number of elements, flat; None if the copy lacks it."""
Reading = dict[tuple, tuple[torch.Tensor, torch.Tensor, float, float, int]]


def compare(controller: Any, where: Where) -> Reading:
    """Each piece of this rank's stages: sample, the same of the copy, sum, sum of the copy, elements."""
    read = controller.stability_checks.run(StabilityState(), 0, 0)
    snapshot = controller._collectives.broadcast(read.snapshot)
    places = [0, *snapshot.sizes.cumsum().tolist()]
    found = {}
    for index, (stage, name, part) in enumerate(snapshot.keys):
        if stage in controller.parameter_masks:
            numel = int(snapshot.numel[index])
            total = float(snapshot.totals[index])
            at = torch.from_numpy(sample_indices(SEED, (stage, name, part), numel, int(snapshot.sizes[index])))
            sample = torch.from_numpy(snapshot.samples[places[index] : places[index + 1]])
            copy = where(stage, name, part, numel)
            copied, copied_total = (sample, total) if copy is None else (copy[at], float(copy.double().sum()))
            found[stage, name, part] = sample, copied, total, copied_total, numel
    return found


def check(readings: list[Reading]) -> None:
    """A bf16 copy is a rounded one of what was read."""
    for found in readings:
        assert found
        for key, (sample, copy, total, copied_total, numel) in found.items():
            assert torch.equal(sample.to(copy.dtype), copy), key
            assert total == pytest.approx(copied_total, abs=(1e-6 if copy.dtype == torch.float32 else 2e-3) * numel)


def covered(found: Reading) -> dict[tuple[int, str], int]:
    """Elements read of each parameter of this rank's stages."""
    elements: dict[tuple[int, str], int] = {}
    for (stage, name, _), (*_, numel) in found.items():
        elements[stage, name] = elements.get((stage, name), 0) + numel
    return elements


def moved(earlier: Reading, later: Reading) -> tuple[int, int]:
    """Sampled elements that moved by what was read, and by the copy."""
    both = [(later[key][i] != earlier[key][i]).sum() for key in earlier for i in (0, 1)]
    return int(sum(both[::2])), int(sum(both[1::2]))


# --- DeepSpeed -----------------------------------------------------------------------------------------------

ZERO1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
SMALL_STEPS = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}}}
DEEPSPEED = {
    "fp32": {},
    "zero1": ZERO1,
    "bf16 zero1": {**BF16, **ZERO1, **SMALL_STEPS},
    "bf16 zero0": {**BF16, "data_types": {"grad_accum_dtype": "bf16"}, **SMALL_STEPS},
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed(pools: Any, name: str) -> None:
    outcomes = pools(4).run(deepspeed, DEEPSPEED[name])
    for earlier, later, whole in outcomes:
        check([earlier, later])
        assert covered(later) == whole
        read, copied = moved(earlier, later)
        assert read > (2 * copied if "bf16" in name else 0)  # weights alone would round it away


def deepspeed(config: dict[str, Any]) -> tuple[Reading, Reading, dict]:
    from deepspeed_ranks import Case, batch, build_engine

    import tf_adapters.deepspeed

    case = Case(config=config, section=SECTION)
    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    assert adapter is not None
    named = dict(engine.module.named_parameters())

    def where(stage: int, name: str, part: tuple[int, ...], numel: int) -> torch.Tensor:
        begin = part[0] if part else 0
        return named[name].detach().flatten()[begin : begin + numel]

    readings = []
    for step in range(3):
        engine.train_batch(iter(batch(step, engine.grid.data_parallel_id, case.microbatches)))
        readings.append(compare(adapter.controller, where))
    adapter.detach()
    return readings[0], readings[-1], {(engine.stage_id, name): p.numel() for name, p in named.items()}


# --- Megatron-Core -------------------------------------------------------------------------------------------

SHARDED = {"use_distributed_optimizer": True}
BF16_MODEL = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
BF16_OPTIMIZER = {"bf16": True, "params_dtype": torch.bfloat16, "lr": 1e-5}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_ffn_hidden_size": 16}
MEGATRON: dict[str, dict[str, Any]] = {
    "bf16": {"model": BF16_MODEL, "optimizer": BF16_OPTIMIZER},
    "distributed optimizer": {"ddp": SHARDED, "optimizer": SHARDED},
    "bf16, distributed optimizer": {
        "model": BF16_MODEL,
        "ddp": SHARDED,
        "optimizer": {**SHARDED, **BF16_OPTIMIZER},
    },
    "tensor parallel": {"tp": 2},
    "interleaved": {"vp": 2},
    "experts": {"ep": 2, "model": EXPERTS},
}


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron(megatron: Any, name: str) -> None:
    outcomes = megatron(4).run(megatron_core, MEGATRON[name])
    for earlier, later, whole in outcomes:
        check([earlier, later])
        times = {numel / whole[key] for key, numel in covered(later).items()}
        assert times == ({1, 2} if name in ("tensor parallel", "experts") else {1})  # 2: both ranks' shards
        read, copied = moved(earlier, later)
        assert read > (2 * copied if "bf16" in name else 0)


def megatron_core(settings: dict[str, Any]) -> tuple[Reading, Reading, dict]:
    from megatron_ranks import Case, by_name, start, train_step, values

    case = Case(section=SECTION, **settings)
    chunks, optimizer, adapter = start(case)
    held = adapter.controller.stability_checks._held
    readings = []
    for step in range(3):
        train_step(case, chunks, optimizer, step)
        copies = by_name(case, chunks, values)

        def where(
            stage: int, name: str, part: tuple[int, ...], numel: int, copies: dict = copies
        ) -> torch.Tensor | None:
            """Values of other tensor- and expert-parallel ranks are theirs to compare."""
            places = {piece.part[:2] for piece in held(stage, name)}
            if places and part[:2] not in places:
                return None
            return copies[stage, name].flatten()[part[2] : part[2] + numel]

        readings.append(compare(adapter.controller, where))
    adapter.detach()
    return readings[0], readings[-1], {key: value.numel() for key, value in copies.items()}


# --- torch.distributed.pipelining ----------------------------------------------------------------------------

TORCH = {
    "ddp": {"replicas": "ddp"},
    "fsdp": {"replicas": "fsdp"},
    "fsdp, parts too": {"replicas": "fsdp kept", "schedule": "ScheduleZBVZeroBubble"},
    "tensor parallel": {"replicas": "tp"},
}


@pytest.mark.parametrize("name", TORCH)
def test_torch(name: str) -> None:
    from torch_ranks import pool

    for earlier, later, whole in pool(4).run(torch_pipelining, TORCH[name]):
        check([earlier, later])
        assert covered(later) == whole
        assert moved(earlier, later)[0] > 0


def torch_pipelining(settings: dict[str, Any]) -> tuple[Reading, Reading, dict]:
    from torch.distributed.tensor import DTensor, Shard
    from torch_ranks import Case, attached, plain, whole

    run = attached(Case(section=SECTION, **settings))
    parameters = {(s.stage_index, plain(n)): p for s in run.stages for n, p in s.submod.named_parameters()}
    readings = []
    for step in range(3):
        run.train_step(step)
        copies = whole(parameters)

        def where(stage: int, name: str, part: tuple[int, ...], numel: int, copies: dict = copies) -> torch.Tensor:
            parameter, copy = parameters[stage, name], copies[stage, name]
            if isinstance(parameter, DTensor):
                for size, coordinate, placement in zip(
                    parameter.device_mesh.shape, part, parameter.placements, strict=True
                ):
                    if isinstance(placement, Shard):
                        copy = copy.chunk(size, dim=placement.dim)[coordinate]
            return copy.flatten()

        readings.append(compare(run.adapter.controller, where))
    run.adapter.detach()
    return readings[0], readings[-1], {key: copy.numel() for key, copy in copies.items()}
