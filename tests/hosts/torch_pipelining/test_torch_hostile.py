"""Code of users that is hostile to deferred weight gradients, on torch's schedules: the host's bits, or a line."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hostile import WIDTH, Situation, check, copies
from hostile_runs import MICROBATCHES, RATIOS, SECTION, STEPS, nothing, trained
from hostile_situations import SITUATIONS
from rank_pools import rank_pool
from stage_runs import on_both
from stage_training import forget_groups, pipeline_group
from torch_ranks import device_mesh

from tf_adapters.testing import force_plan, masked_gradients, relative_error

pytestmark = pytest.mark.distributed

NAMES = [name for name in SITUATIONS if name != "two checkpoints"]
"""Situations that can occur here. With ``use_reentrant=True``, torch's schedules alone raise an error."""

OF_PARAMETERS = ("multi-grad hook", "weight hook", "accumulated hook", "step in the backward")
IN_THE_LOSS = ("penalty", "penalty, from step 3", "backward with inputs")
SHARDED = [n for n in NAMES if n not in (*OF_PARAMETERS, *IN_THE_LOSS) and not n.startswith("gradient of a weight")]
"""Situations that can occur where FSDP shards a stage.

Its parameters run no hook in the backward, since other tensors get the gradients. Their values are freed before the
loss is computed.
"""


class Run:
    """One rank's part of a run of a situation."""

    def __init__(self, situation: Situation, sharded: bool, section: dict[str, Any] | None, ratio: float | None):
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        import tf_adapters.torch_pipelining

        self.situation, self.rank = situation, dist.get_rank()
        self.recorded = bool(ratio)  # what each step masks
        blocks = [situation.block() for _ in range(2)]
        self.model = blocks[self.rank]
        situation.blocks = [self.model]
        if sharded:
            fully_shard(self.model, mesh=device_mesh(1, 2)["dp"])
        situation.prepare()
        stage = PipelineStage(self.model, self.rank, 2, torch.device("cpu"), group=pipeline_group())
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=self._loss, scale_grads=situation.batches == 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.adapter: Any = None
        if section is not None:
            self.adapter = tf_adapters.torch_pipelining.attach(self.schedule, section, optimizer=self.optimizer)
        if ratio is not None:
            force_plan(self.adapter.controller, ratio)

    def step(self, number: int) -> dict[str, Any]:
        masks = {"masks": [self._mask(microbatch) for microbatch in range(MICROBATCHES)]} if self.recorded else {}
        self.optimizer.zero_grad()
        for batch in range(self.situation.batches):
            self.situation.begin(number, batch)
            inputs, targets = data(self.situation, 100 * batch + number)
            if self.rank == 0:
                self.schedule.step(inputs)
            else:
                self.schedule.step(target=targets)
        found = copies({f"gradient of {name}": p.grad for name, p in self.model.named_parameters()})
        self.optimizer.step()
        self.situation.end()
        return found | copies(dict(self.model.named_parameters())) | masks

    def _mask(self, microbatch: int) -> tuple[str, ...]:
        controller = self.adapter.controller
        return controller.frozen_parameters(controller.step, self.rank, microbatch)  # type: ignore[no-any-return]

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.situation.loss(torch.nn.functional.mse_loss(output, target), output)


def data(situation: Situation, number: int) -> list[torch.Tensor]:
    """Inputs and targets of a batch: a pure function of its number."""
    generator = torch.Generator().manual_seed(number)
    rows, *more = situation.shape
    return [torch.randn(MICROBATCHES * rows, *more, WIDTH, generator=generator) for _ in range(2)]


def train(
    name: str,
    sharded: bool = False,
    section: dict[str, Any] | None = None,
    ratio: float | None = None,
    states: list[Any] | None = None,
) -> dict[str, Any]:
    """Run a situation on this rank; an error on one ends the run on both. ``states`` are of another run, by rank."""
    situation, found = SITUATIONS[name](), nothing()
    if sharded:
        device_mesh(1, 2)  # its groups outlive the run
    kept = list(dist.distributed_c10d._world.pg_map)
    state = None if states is None else states[dist.get_rank()]
    start = partial(Run, situation, sharded, section, ratio)
    _, found["raised"] = on_both(partial(trained, situation, start, found, state), kept)
    forget_groups(kept)
    return found


@cache
def alone(name: str, sharded: bool = False) -> Any:
    """The host alone, on both ranks."""
    ranks = rank_pool("torch", 2).run(train, name, sharded)
    assert not any(rank["raised"] for rank in ranks), ranks[0]["raised"]
    return ranks


def ours(name: str, output_dir: Any, *, sharded: bool = False, ratio: float | None = None, states: Any = None) -> Any:
    """The same run with the package, on both ranks."""
    section = {**SECTION, "output_dir": str(output_dir)}
    return rank_pool("torch", 2).run(train, name, sharded, section, ratio, states)


@pytest.mark.parametrize("ratio", RATIOS.values(), ids=RATIOS)
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_the_hosts_or_a_line_says_so(name: str, ratio: float | None, tmp_path: Any) -> None:
    check(SITUATIONS[name](), ours(name, tmp_path, ratio=ratio), alone(name))


@pytest.mark.parametrize("name", SHARDED)
def test_bits_are_the_hosts_or_a_line_says_so_where_fsdp_shards_the_stage(name: str, tmp_path: Any) -> None:
    check(SITUATIONS[name](), ours(name, tmp_path, sharded=True, ratio=0.0), alone(name, sharded=True))


def test_a_resumed_run_checks_the_code_that_runs_now(tmp_path: Any) -> None:
    """The saved run had no penalty in its forward."""
    states = [rank["saved"] for rank in ours("nothing hostile", tmp_path)]
    name = "penalty in the forward"
    check(SITUATIONS[name](), ours(name, tmp_path, states=states), alone(name))


def in_one_process(name: str, step: int, run: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The mean over microbatches of the gradients that the masks of a step leave, in one process."""
    situation = SITUATIONS[name]()
    model = torch.nn.Sequential(situation.block(), situation.block())
    for number, block in enumerate(model):
        if step:
            before = run[number]["steps"][step - 1]
            block.load_state_dict({weight: before[weight] for weight in block.state_dict()})
    situation.begin(step)
    masks = [rank["steps"][step]["masks"] for rank in run]

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return situation.loss(torch.nn.functional.mse_loss(output, target), output)

    def frozen(microbatch: int) -> set[str]:
        return {f"{stage}.{weight}" for stage in range(2) for weight in masks[stage][microbatch]}

    inputs, targets = (tensor.chunk(MICROBATCHES) for tensor in data(situation, step))
    return masked_gradients(model, zip(inputs, targets, strict=True), loss_fn, frozen)


@pytest.mark.parametrize("weight_gradients", ["deferred", "in_place"])
@pytest.mark.parametrize("name", [n for n in SITUATIONS if n.startswith("gradient in the loss")])
def test_masks_leave_the_oracles_gradients_where_the_loss_takes_one(
    name: str, weight_gradients: str, tmp_path: Any
) -> None:
    section = {**SECTION, "goal": "paper", "weight_gradients": weight_gradients, "output_dir": str(tmp_path)}
    pool = rank_pool("torch", 2)
    run = pool.run(train, name, False, section, 0.6)
    assert not run[0]["raised"], run[0]["raised"]
    assert any(names for rank in run for step in rank["steps"] for names in step["masks"])
    for step in range(STEPS):
        for weight, expected in pool.run(in_one_process, name, step, run)[0].items():
            stage, _, own = weight.partition(".")
            gradient = run[int(stage)]["steps"][step][f"gradient of {own}"]
            gradient = torch.zeros_like(expected) if gradient is None else gradient
            assert relative_error(gradient, expected) <= 1e-5, (step, weight)
