"""Updates before the norm is known on Megatron-Core: the trained weights are those of updates after it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_post_validation import assert_same_bits, limited, trained, values
from megatron_ranks import Case, innermost, run_batch, setup, start, zero_gradients
from overlapping_steps import POST_VALIDATED
from post_validated_runs import ALWAYS, HALF, assert_counted, assert_nobody_waits, train_until_killed
from rank_pools import fork_ranks

from tf_adapters.errors import UnsupportedError
from tf_adapters.hosts import post_validation
from tf_adapters.testing.emulated_device import EmulatedDevice

pytestmark = pytest.mark.distributed

DROPOUT = {"hidden_dropout": 0.1}
ALONE = Case(pp=4, layers=4, microbatches=8, section=None, steps=16, model=DROPOUT)
CASE = replace(ALONE, section=POST_VALIDATED)
LIMITS = {"never": 1e6, "always": ALWAYS, HALF: 0.43}
STEPS = {HALF: 40}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
MODELS: dict[str, dict[str, Any]] = {
    "two stages": {"pp": 2},
    "bf16": {"model": {**DROPOUT, **BF16, "pipeline_dtype": torch.bfloat16}, "optimizer": BF16},
    "replicas, distributed optimizer": {
        "pp": 2,
        "model": {**DROPOUT, **BF16, "pipeline_dtype": torch.bfloat16},
        "ddp": {"use_distributed_optimizer": True},
        "optimizer": {**BF16, "use_distributed_optimizer": True},
    },
    "overlapped reduction": {"pp": 2, "ddp": {"overlap_grad_reduce": True}},
    "tied": {"tied": True},
    "recomputed": {
        "model": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    },
    "tensor parallel": {"pp": 2, "tp": 2},
}


@pytest.mark.parametrize("limit", LIMITS)
def test_the_weights_are_those_of_updates_after_the_norm(megatron, tmp_path, limit):
    alone = limited(replace(ALONE, steps=STEPS.get(limit, ALONE.steps)), LIMITS[limit])
    case = replace(alone, section=POST_VALIDATED, output_dir=str(tmp_path))
    ours = megatron(4).run(trained, case)
    assert_same_bits(ours, megatron(4).run(trained, alone))
    assert_counted(ours, case.steps, limit, tmp_path)


@pytest.mark.parametrize("model", MODELS)
def test_models_and_optimizers(megatron, tmp_path, model):
    alone = limited(replace(ALONE, steps=8, **MODELS[model]), LIMITS["always"])
    ours = megatron(4).run(trained, replace(alone, section=POST_VALIDATED, output_dir=str(tmp_path)))
    assert_same_bits(ours, megatron(4).run(trained, alone))
    assert ours[0]["counts"] == (7, 7)


def test_what_is_saved_or_evaluated_between_update_and_validation_is_final(megatron, tmp_path):
    alone = limited(replace(ALONE, steps=10), LIMITS["always"])
    ours = megatron(4).run(trained, replace(alone, section=POST_VALIDATED, output_dir=str(tmp_path)), False, (4, 7, 9))
    assert_same_bits(ours, megatron(4).run(trained, alone, False, (4, 7, 9)))


def train_step(case: Case, chunks: list[Any], optimizer: Any, step: int) -> None:
    zero_gradients(chunks, optimizer)
    run_batch(case, chunks, step, range(case.microbatches))
    optimizer.step()


def resumed(case: Case) -> list[torch.Tensor]:
    """Go back to an earlier state when the last update has to be made again."""
    chunks, optimizer, adapter = start(case)
    early: list[Any] = []
    for step in range(10):
        train_step(case, chunks, optimizer, step)
        if step == 4:
            early = copy.deepcopy([innermost(chunks[0]).state_dict(), optimizer.state_dict()])
        if step == 7:
            innermost(chunks[0]).load_state_dict(early[0])
            optimizer.load_state_dict(early[1])
    if adapter is not None:
        adapter.detach()
    return values(chunks, optimizer)


def test_a_state_that_is_loaded_before_validation_stays(megatron, tmp_path):
    case = limited(replace(CASE, output_dir=str(tmp_path)), LIMITS["always"])
    ours = megatron(4).run(resumed, case)
    for mine, theirs in zip(ours, megatron(4).run(resumed, replace(case, section=None)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_it_pauses_while_many_updates_are_made_again(megatron, tmp_path):
    alone = limited(replace(ALONE, steps=26), LIMITS["always"])
    ours = megatron(4).run(trained, replace(alone, section=POST_VALIDATED, output_dir=str(tmp_path)), True)
    assert_same_bits(ours, megatron(4).run(trained, alone, True))
    assert ours[0]["counts"] == (post_validation._LOOKED_AT,) * 2
    assert sum("wait for the norm" in line for line in ours[0]["log"]) == 1


def killed(case: Case, killed_rank: int) -> None:
    chunks, optimizer, _ = start(case)
    train_until_killed(lambda step: train_step(case, chunks, optimizer, step), case.steps, killed_rank)


@pytest.mark.parametrize("killed_rank", [0, 2])
def test_a_rank_that_is_killed_before_validation_leaves_nobody_waiting(tmp_path, killed_rank):
    case = limited(replace(CASE, output_dir=str(tmp_path)), LIMITS["always"])
    with fork_ranks(4, setup) as ranks:
        assert_nobody_waits(ranks, killed, case, killed_rank)


def overlap(case: Case) -> str:
    with EmulatedDevice(8e6):
        chunks, optimizer, adapter = start(case)
        for step in range(12):
            train_step(case, chunks, optimizer, step)
        found = adapter.controller.state.measurement.steps
        adapter.detach()
    return str(found)


def test_ranks_do_not_meet_for_the_norm(megatron, tmp_path):
    section = {**POST_VALIDATED, "monitoring_steps": 8}
    case = limited(replace(CASE, model={}, section=section, output_dir=str(tmp_path)), LIMITS["never"])
    assert megatron(4).run(overlap, case) == ["overlap"] * 4


def refused(case: Case) -> str:
    try:
        start(case)
    except UnsupportedError as error:
        return str(error)
    return ""


REFUSED = {
    "interleaved": ({"pp": 2, "vp": 2, "microbatches": 8}, "needs 1F1B on two or more stages"),
    "parameters gathered in the next forward": (
        {
            "pp": 2,
            "model": {**BF16, "pipeline_dtype": torch.bfloat16},
            "ddp": {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True},
            "optimizer": {**BF16, "use_distributed_optimizer": True, "overlap_param_gather": True},
        },
        "overlap_param_gather is True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_again_is_refused_in_one_line(megatron, name):
    how, words = REFUSED[name]
    for line in megatron(2).run(refused, limited(replace(CASE, **{"model": {}, **how}), 1.0)):
        assert words in line
        assert "\n" not in line
