"""Runs of other sizes or other microbatches, steps that the host skips, chunks without parameters, on every host."""

from __future__ import annotations

import importlib
import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import hosts
import pytest
import torch
from disturbed_runs import AT, SHORT_LIFE, each_host
from jobs import Tell, start

Sizes = tuple[int, int, int, int]  # stages, microbatches, replicas, tensor shards
USUAL: Sizes = (2, 4, 1, 1)
SHORT = {"warmup_steps": 2, "monitoring_steps": 6, "progressive_steps": 2}


def build(host: str, sizes: Sizes, section: dict[str, Any] | None) -> Any:
    """The host's model of the contract tests, cut otherwise."""
    module: Any = importlib.import_module(hosts.HOSTS[host])
    module.STAGES, module.MICROBATCHES = sizes[:2]
    if sizes[3] > 1:
        module.Case = partial(module.Case, tp=sizes[3])
    if host == "deepspeed":
        ranks = importlib.import_module("deepspeed_ranks")
        ranks.PLAIN = {**ranks.PLAIN, "gradient_accumulation_steps": sizes[1]}
    return hosts.start(host, section, output_dir="out")


# --- a state is loaded into a run of other sizes ---------------------------------------------------------------


def train_to_stable(tell: Tell, host: str, sizes: Sizes) -> None:
    training = build(host, sizes, SHORT)
    for number in range(14):
        training.step(number)
    if os.environ["RANK"] == "0":
        Path("state.json").write_text(json.dumps(training.controller.state_dict()))
    tell(phase=training.controller.phase.value)
    training.detach()


def go_on(tell: Tell, host: str, sizes: Sizes, saved: str) -> None:
    training = build(host, sizes, SHORT)
    training.controller.load_state_dict(json.loads(Path(saved).read_text()))
    first = training.controller.phase.value
    for number in range(14, 30):
        training.step(number)
    state = training.controller.state
    told = {"first": first, "last": training.controller.phase.value, "failure": state.failure, "notes": state.notes}
    tell(**told, steps=state.completed_steps)
    training.detach()


OTHER: dict[str, tuple[Sizes, Sizes]] = {
    "more replicas": (USUAL, (2, 4, 2, 1)),
    "fewer replicas": ((2, 4, 2, 1), USUAL),
    "more stages": (USUAL, (4, 4, 1, 1)),
    "fewer stages": ((4, 4, 1, 1), USUAL),
    "more microbatches": (USUAL, (2, 6, 1, 1)),
    "fewer microbatches": ((2, 6, 1, 1), USUAL),
    "more tensor shards": (USUAL, (2, 4, 1, 2)),
    "fewer tensor shards": ((2, 4, 1, 2), USUAL),
}


@each_host
@pytest.mark.parametrize("change", OTHER)
def fault_a_run_goes_on_with_other_sizes(host: str, change: str, tmp_path: Path) -> None:
    """With other replicas or shards the plan stands, other microbatches get one; other stages are monitored anew."""
    before, after = OTHER[change]
    if "shards" in change and host != "megatron":
        pytest.skip("this host's tests have no tensor parallelism in this model")
    ranks = [sizes[0] * sizes[2] * sizes[3] for sizes in (before, after)]
    with start(train_to_stable, host, tmp_path / "a", before, size=ranks[0]) as first:
        assert first.ended() == [0] * ranks[0], first.output(0)
        assert first.events(0)[-1]["phase"] == "stable"
    with start(go_on, host, tmp_path / "b", after, str(tmp_path / "a" / "state.json"), size=ranks[1]) as second:
        assert second.ended() == [0] * ranks[1], second.output(0)
    told = [second.events(rank)[-1] for rank in range(ranks[1])]
    assert all(of_rank == told[0] for of_rank in told)
    assert (told[0]["failure"], told[0]["last"], told[0]["steps"]) == (None, "stable", 30)
    if "stages" not in change:
        assert told[0]["first"] == "stable"
    else:
        assert told[0]["first"] == "monitoring_upper"
        assert any("the checkpoint's plan is for another pipeline, model or budget" in n for n in told[0]["notes"])


# --- another number of microbatches in every step ---------------------------------------------------------------


def change_every_step(tell: Tell, host: str, frozen: bool) -> None:
    training = build(host, USUAL, SHORT if frozen else None)
    module: Any = importlib.import_module(hosts.HOSTS[host])
    losses = []
    for number in range(40):
        count = 4 if number >= 20 else (4, 6, 8)[number % 3]
        module.MICROBATCHES = count
        if host == "deepspeed":
            training.engine.set_train_batch_size(count * training.engine.train_micro_batch_size_per_gpu())
        losses.append(training.step(number))
    told: dict[str, Any] = {"losses": losses}
    if frozen:
        state = training.controller.state
        told |= {"failure": state.failure, "phase": training.controller.phase.value, "numbers": sorted(state.plans.of)}
        told["alone"] = state.phases.warmup_end + 1  # until the first masks of monitoring
        training.detach()
    tell(**told)


@each_host
def fault_microbatches_change_in_every_step(host: str, tmp_path: Path) -> None:
    """All are monitored together, and each has a plan of its own."""
    if host == "torch":
        pytest.skip("a schedule of torch has one number of microbatches: another one is another schedule")
    told = []
    for frozen in (True, False):
        with start(change_every_step, host, tmp_path / str(frozen), frozen) as job:
            assert job.ended() == [0, 0], job.output(0) + job.output(1)
            told.append([job.events(rank)[-1] for rank in range(2)])
    for ours, alone in zip(*told, strict=True):
        assert (ours["failure"], ours["phase"], ours["numbers"]) == (None, "stable", [4, 6, 8])
        assert ours["losses"][: ours["alone"]] == alone["losses"][: ours["alone"]]
    assert any(ours["losses"] != alone["losses"] for ours, alone in zip(*told, strict=True))  # the last stage has them


# --- steps that the host skips -----------------------------------------------------------------------------------


def overflow(tell: Tell, host: str, phase: str) -> None:
    """Megatron in fp16: a gradient on rank 1 overflows, so the optimizers of all ranks skip the step."""
    from megatron_ranks import run_batch, zero_gradients

    module: Any = importlib.import_module(hosts.HOSTS[host])
    half = {"fp16": True, "params_dtype": torch.float16}
    dynamic = {**half, "initial_loss_scale": 64.0, "min_loss_scale": 1.0, "loss_scale_window": 1000, "hysteresis": 1}
    module.Case = partial(module.Case, model={**half, "pipeline_dtype": torch.float16}, optimizer=dynamic)
    training = hosts.start(host, SHORT_LIFE, output_dir="out")
    still = False
    for number in range(30):
        zero_gradients(training.chunks, training.optimizer)
        run_batch(training.case, training.chunks, number, range(hosts.MICROBATCHES))
        before = training.parameters()
        if number == AT[phase] and int(os.environ["RANK"]) == 1:
            next(iter(training.chunks[0].parameters())).main_grad.fill_(math.inf)
        done = training.optimizer.step()[0]
        assert done == (number != AT[phase])
        if number == AT[phase]:
            still = all(torch.equal(value, before[name]) for name, value in training.parameters().items())
    state = training.controller.state
    told = {"failure": state.failure, "phase": training.controller.phase.value, "steps": state.completed_steps}
    tell(**told, still=still, scale=float(training.optimizer.get_loss_scale()))
    training.detach()


@pytest.mark.parametrize("phase", AT)
def fault_megatron_skips_a_step(phase: str, tmp_path: Path) -> None:
    """Nothing moves in it, on any rank, whatever was frozen; the phases go on."""
    with start(overflow, "megatron", tmp_path, phase) as job:
        assert job.ended() == [0, 0], job.output(0) + job.output(1)
        for rank in range(2):
            expected = {"failure": None, "phase": "stable", "steps": 30, "still": True, "scale": 32.0}
            assert job.events(rank)[-1] == expected


# --- a chunk without parameters ----------------------------------------------------------------------------------


def with_a_bare_chunk(host: str) -> Any:
    """A run with one model chunk, between others, that has nothing to train, and no optimizer for it."""
    module: Any = importlib.import_module(hosts.HOSTS[host])
    if host == "megatron":
        layout = [["embedding", "decoder", "decoder"], ["decoder"], [], ["decoder", "loss"]]
        module.Case = partial(module.Case, vp=2, model={"pipeline_model_parallel_layout": layout})
    else:
        ranks: Any = importlib.import_module("torch_ranks")
        module.STAGES = 4
        ranks.stage_layers = lambda stage, _: [(0, 4), (5, 5), (6, 5), (6, 9)][stage]
        make = ranks.make_optimizer
        ranks.make_optimizer = lambda case, parameters: make(case, [*parameters, torch.nn.Parameter(torch.zeros(1))])
        whole = ranks.Layers.forward
        ranks.Layers.forward = lambda self, x: whole(self, x) if len(self.layers) else torch.tanh(x)
    return hosts.start(host, {**SHORT, "max_freeze_ratio": 0.9}, output_dir="out")


def train_with_a_bare_chunk(tell: Tell, host: str) -> None:
    training = with_a_bare_chunk(host)
    for number in range(20):
        training.step(number)
    state = training.controller.state
    bare = [stage for stage, named in training.controller.pipeline.parameters.items() if not named]
    tell(failure=state.failure, phase=training.controller.phase.value, bare=bare, mean=state.plan.mean_freeze_ratio)
    training.detach()


@each_host
def fault_a_chunk_has_no_parameters(host: str, tmp_path: Path) -> None:
    """It is planned around: the others freeze."""
    if host == "deepspeed":
        pytest.skip("DeepSpeed itself cannot make an optimizer of no parameters")
    with start(train_with_a_bare_chunk, host, tmp_path, size=4 if host == "torch" else 2) as job:
        assert set(job.ended()) == {0}, job.output(0) + job.output(1)
        told = [job.events(rank)[-1] for rank in range(len(job.ranks))]
    assert [(of["failure"], of["phase"]) for of in told] == [(None, "stable")] * len(told)
    assert [stage for of_rank in told for stage in of_rank["bare"]] == [2]
    assert told[0]["mean"] > 0.0
