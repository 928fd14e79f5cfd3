"""Layers as users write them on torch's schedules: the host's bits with nothing frozen, else the oracle's gradients."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pools import rank_pool, seed
from user_layers import (
    ENGINE_MODELS,
    LAYERS,
    MODELS,
    Pair,
    check_nothing_is_promised,
    engine_ranks,
    layer_kinds,
    samples,
)

from tf_adapters.testing import RankPool, force_plan, relative_error
from tf_adapters.weight_gradients.reasons import USERS_HOOK

pytestmark = pytest.mark.distributed

STEPS, MICROBATCHES = 6, 4
SECTION: dict[str, Any] = {
    "max_freeze_ratio": 0.8,
    "warmup_steps": 1,
    "monitoring_steps": 2,
    "progressive_steps": 2,
    "on_error": "raise",
}
NOTHING: dict[str, Any] = {"max_freeze_ratio": 0.0}
DEFERRED: dict[str, Any] = {"weight_gradients": "deferred"}
TOKENS: dict[str, Any] = {"granularity": "token"}


class Stage(torch.nn.Module):
    """Half of a model's layers; two streams pass from stage to stage as two arguments."""

    def __init__(self, name: str, stage: int) -> None:
        super().__init__()
        kinds = layer_kinds(name)
        half = len(kinds) // 2
        seed(10 + stage)
        self.parts = torch.nn.ModuleList(LAYERS[kind]() for kind in kinds[stage * half : (stage + 1) * half])

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | Pair:
        x: Any = inputs[0] if len(inputs) == 1 else inputs
        for part in self.parts:
            x = part(x)
        return x


def updating_in_the_backward(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose updates are made by hooks as soon as a gradient is there."""

    def update(parameter: torch.nn.Parameter) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)  # past autograd's check of versions
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    name: str, section: dict[str, Any] | None, ratio: float | None, output_dir: str, in_backward: bool = False
) -> dict[str, Any]:
    """One rank's part of a few steps."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    import tf_adapters.torch_pipelining

    rank = dist.get_rank()
    model = Stage(name, rank)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    optimizer = updating_in_the_backward(model) if in_backward else torch.optim.AdamW(model.parameters(), lr=1e-2)
    adapter = None
    if section is not None:
        settings = {**SECTION, "output_dir": output_dir, **section}
        adapter = tf_adapters.torch_pipelining.attach(schedule, settings, optimizer=optimizer)
        if ratio is not None:
            force_plan(adapter.controller, ratio)
    named = dict(model.named_parameters())
    result: dict[str, Any] = {"losses": [], "masks": [], "weights": [], "gradients": []}
    for step in range(STEPS):
        batch = samples(name, step, MICROBATCHES)
        result["weights"].append({n: p.detach().clone() for n, p in named.items()})
        if adapter is not None:
            masks = adapter.controller.frozen_parameters
            result["masks"].append([masks(adapter.controller.step, rank, m) for m in range(MICROBATCHES)])
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(torch.cat([x for x, _ in batch]))
        else:
            schedule.step(target=torch.cat([target for _, target in batch]), losses=losses)
        result["gradients"].append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()}
        )
        optimizer.step()
        result["losses"].append([float(loss) for loss in losses])
    result["parameters"] = {n: p.detach().clone() for n, p in named.items()}
    if adapter is not None:
        controller = adapter.controller
        result |= {"notes": controller.state.notes, "failure": controller.state.failure, "plan": controller.state.plan}
        result["shares"] = dict(controller.state.taps.shares) if controller.state.taps else {}
        adapter.detach()
    return result


def expected(name: str, step: int, ranks: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """By stage, the mean over microbatches of the gradients that the masks leave, in one process."""
    stages = [Stage(name, stage) for stage in range(2)]
    for stage, rank in zip(stages, ranks, strict=True):
        stage.load_state_dict(rank["weights"][step], strict=False)
    totals = [{n: torch.zeros_like(p) for n, p in stage.named_parameters()} for stage in stages]
    for microbatch, (x, target) in enumerate(samples(name, step, MICROBATCHES)):
        for stage in stages:
            stage.zero_grad()
        between = stages[0](x)
        output = stages[1](*between) if isinstance(between, tuple) else stages[1](between)
        torch.nn.functional.mse_loss(output, target).backward()
        for stage, total, rank in zip(stages, totals, ranks, strict=True):
            for n, p in stage.named_parameters():
                if n not in rank["masks"][step][microbatch] and p.grad is not None:
                    total[n] += p.grad / MICROBATCHES
    return totals


def same_as_alone(
    name: str, section: dict[str, Any], output_dir: str, in_backward: bool = False, ranks: RankPool | None = None
) -> Any:
    pool = ranks or rank_pool("torch", 2)
    alone = pool.run(train, name, None, None, output_dir, in_backward)
    ours = pool.run(train, name, {**NOTHING, **section}, 0.0, output_dir, in_backward)
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["failure"] is None
        assert mine["losses"] == theirs["losses"]
        for weight, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][weight], value), weight
    return ours


@pytest.mark.parametrize("section", [{}, DEFERRED, TOKENS], ids=["in place", "deferred", "tokens"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_frozen_is_the_host_to_the_bit(name: str, section: dict[str, Any], tmp_path: Any) -> None:
    same_as_alone(name, section, str(tmp_path))


@pytest.mark.parametrize("section", [{}, DEFERRED], ids=["in place", "deferred"])
@pytest.mark.parametrize("name", MODELS)
def test_masks_leave_the_oracles_gradients(name: str, section: dict[str, Any], tmp_path: Any) -> None:
    check_masks(name, section, str(tmp_path), rank_pool("torch", 2))


def check_masks(name: str, section: dict[str, Any], output_dir: str, pool: RankPool) -> None:
    ranks = pool.run(train, name, section, 0.6, output_dir)
    for step in range(STEPS):
        given = [{key: rank[key] for key in ("weights", "masks")} for rank in ranks]
        for rank, oracle in zip(ranks, pool.run(expected, name, step, given)[0], strict=True):
            for weight, gradient in rank["gradients"][step].items():
                assert relative_error(gradient, oracle[weight]) <= 1e-5, (step, weight)
    assert any(names for rank in ranks for step in rank["masks"] for names in step)


@pytest.fixture(scope="module")
def engine() -> Iterator[RankPool]:
    with engine_ranks("torch") as pool:
        yield pool


@pytest.mark.parametrize("section", [{}, DEFERRED, TOKENS], ids=["in place", "deferred", "tokens"])
@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_transformer_engines_layers_keep_the_hosts_bits(
    engine: RankPool, name: str, section: dict[str, Any], tmp_path: Any
) -> None:
    for rank in same_as_alone(name, section, str(tmp_path), ranks=engine):
        assert min(rank["shares"].values(), default=1.0) >= 0.8


@pytest.mark.parametrize("section", [{}, DEFERRED], ids=["in place", "deferred"])
@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_masks_on_transformer_engines_layers_leave_the_oracles_gradients(
    engine: RankPool, name: str, section: dict[str, Any], tmp_path: Any
) -> None:
    check_masks(name, section, str(tmp_path), engine)


def test_updates_inside_the_backward_are_found_out_and_left_to_the_host(tmp_path: Any) -> None:
    for rank in same_as_alone("hooks on activations", DEFERRED, str(tmp_path), in_backward=True):
        assert any(USERS_HOOK in note for note in rank["notes"])


def copies(section: dict[str, Any], output_dir: str) -> bool:
    """Whether copies that are made after attaching compute with their own weights, and are saved as any module."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    import tf_adapters.torch_pipelining

    rank = dist.get_rank()
    model = Stage("energies", rank)
    schedule = Schedule1F1B(
        PipelineStage(model, rank, 2, torch.device("cpu")), MICROBATCHES, loss_fn=torch.nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = list(model.state_dict())
    settings = {**SECTION, "output_dir": output_dir, **section}
    with tf_adapters.torch_pipelining.attach(schedule, settings, optimizer=optimizer):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        found = [average.module, copy.deepcopy(model), torch.load(buffer, weights_only=False)]
        x = torch.ones(2, 8)
        own = all(torch.equal(other(x), model(x)) for other in found)
        for other in found:
            for parameter in other.parameters():
                parameter.data.zero_()
        return own and not any(other(x).any() for other in found) and list(model.state_dict()) == keys


@pytest.mark.parametrize("section", [{}, DEFERRED, TOKENS], ids=["in place", "deferred", "tokens"])
def test_copies_made_after_attaching_are_models_of_their_own(section: dict[str, Any], tmp_path: Any) -> None:
    assert rank_pool("torch", 2).run(copies, section, str(tmp_path)) == [True, True]


def wrapped(section: dict[str, Any], output_dir: str) -> list[bool]:
    """Whether copies that are wrapped while layers are tapped have the gradients of a plain copy."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.parallel import DistributedDataParallel

    import tf_adapters.torch_pipelining

    rank = dist.get_rank()
    model = torch.nn.Sequential(LAYERS["Plain"](), LAYERS["Plain"]())
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {**SECTION, "output_dir": output_dir, **section}
    same = []
    with tf_adapters.torch_pipelining.attach(schedule, settings, optimizer=optimizer):
        for root in model.parameters():
            dist.broadcast(root.data, 0)
        plain, replicated, sharded = (copy.deepcopy(model) for _ in range(3))
        for layer in sharded:
            fully_shard(layer)
        for other in (plain, DistributedDataParallel(replicated), fully_shard(sharded), DistributedDataParallel(model)):
            other(torch.ones(2, 8)).sum().backward()
        for other in (replicated, sharded, model):
            gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in other.parameters()]
            same.append(all(map(torch.equal, gradients, (p.grad for p in plain.parameters()))))
    return same


@pytest.mark.parametrize("section", [{}, DEFERRED, TOKENS], ids=["in place", "deferred", "tokens"])
def test_models_that_are_wrapped_after_attaching_train_as_without_us(section: dict[str, Any], tmp_path: Any) -> None:
    assert rank_pool("torch", 2).run(wrapped, section, str(tmp_path)) == [[True] * 3] * 2


@pytest.mark.parametrize("section", [DEFERRED, TOKENS, {**DEFERRED, **TOKENS}], ids=["deferred", "tokens", "both"])
@pytest.mark.parametrize("name", ["no taps", "no taps on a stage"])
def test_where_nothing_has_a_tap_nothing_is_promised(name: str, section: dict[str, Any], tmp_path: Any) -> None:
    ranks = rank_pool("torch", 2).run(train, name, section, None, str(tmp_path))
    check_nothing_is_promised(name, ranks)
