"""Updates before the norm is known on Megatron-Core: the trained weights are those of updates after it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from logged import Lines
from megatron_ranks import Case, innermost, run_batch, setup, start, zero_gradients
from rank_pools import fork_ranks

from tf_adapters.errors import UnsupportedError
from tf_adapters.hosts import post_validation
from tf_adapters.hosts.late import LateTensor
from tf_adapters.report import Report
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.ranks import RanksFailed

pytestmark = pytest.mark.distributed

SECTION = {
    "weight_gradients": "deferred",
    "max_freeze_ratio": 0.0,
    "optimizer_step": "post_validated",
    "extra_microbatches": 4,
    "monitoring_steps": 4,
    "progressive_steps": 0,
    "replan_threshold": 0.0,
    "replan_interval": 1000,
}
DROPOUT = {"hidden_dropout": 0.1}
ALONE = Case(pp=4, layers=4, microbatches=8, section=None, steps=16, model=DROPOUT)
CASE = replace(ALONE, section=SECTION)
LIMITS = {"never": 1e6, "always": 1e-2, "now and then": 1.5}
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


def limited(case: Case, limit: float) -> Case:
    return replace(case, optimizer={**case.optimizer, "clip_grad": limit})


def values(chunks: list[Any], optimizer: Any) -> list[torch.Tensor]:
    """The trained parameters through ``state_dict``, and what the inner optimizers hold."""
    states = [innermost(chunk).state_dict() for chunk in chunks]
    found = [v.detach().clone() for state in states for _, v in sorted(state.items()) if torch.is_tensor(v)]
    for leaf in optimizer.chained_optimizers:
        inner = leaf.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                state = inner.state.get(p, {})
                found += [p.detach().clone(), *(v.clone() for _, v in sorted(state.items()) if torch.is_tensor(v))]
    return found


def trained(case: Case, pauses: bool = False, saved: tuple[int, ...] = ()) -> dict[str, Any]:
    """Train; ``saved`` are steps after which the state is read and a batch is evaluated."""
    looked_at = post_validation._LOOKED_AT
    with Lines() as log:
        try:
            post_validation._LOOKED_AT = looked_at if pauses else 10**9
            chunks, optimizer, adapter = start(case)
            losses, norms, late, between = [], [], [], []
            for step in range(case.steps):
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2 * 0.9**step
                zero_gradients(chunks, optimizer)
                losses += run_batch(case, chunks, step, range(case.microbatches))
                norm = optimizer.step()[1]
                late.append(isinstance(norm, LateTensor))
                norms.append(norm)
                if step in saved:
                    between += values(chunks, optimizer)
                    with torch.no_grad():
                        evaluated = run_batch(case, chunks, 500, range(case.microbatches), forward_only=True)
                    between += [entry["loss"] for entry in evaluated]
            result: dict[str, Any] = {
                "losses": [float(entry["loss"]) for entry in losses],
                "norms": [float(norm) for norm in norms],
                "late": late,
            }
            if adapter is not None:
                validation, state = adapter._validation, adapter.controller.state
                adapter.detach()
                result |= {"failure": state.failure, "counts": (validation.updates, validation.made_again)}
            return {**result, "final": values(chunks, optimizer), "between": between, "log": log.seen}
        finally:
            post_validation._LOOKED_AT = looked_at


def assert_same_bits(ours: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["failure"] is None
        assert mine["losses"] == theirs["losses"]
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
        for a, b in zip(mine["final"] + mine["between"], theirs["final"] + theirs["between"], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("limit", LIMITS)
def test_the_weights_are_those_of_updates_after_the_norm(megatron, tmp_path, limit):
    case = limited(replace(CASE, output_dir=str(tmp_path)), LIMITS[limit])
    ours = megatron(4).run(trained, case)
    assert_same_bits(ours, megatron(4).run(trained, limited(ALONE, LIMITS[limit])))
    updates, made_again = ours[0]["counts"]
    assert [rank["counts"] for rank in ours] == [(updates, made_again)] * 4
    assert updates == case.steps - 1
    assert ours[0]["late"] == [False, *[True] * updates]
    if limit != "now and then":
        assert made_again == (updates if limit == "always" else 0)
    report = Report.read(tmp_path / "timely_freeze" / "report.json")
    assert f"{made_again} of them were made again" in report.note[-1]


@pytest.mark.parametrize("model", MODELS)
def test_models_and_optimizers(megatron, tmp_path, model):
    alone = limited(replace(ALONE, steps=8, **MODELS[model]), LIMITS["always"])
    ours = megatron(4).run(trained, replace(alone, section=SECTION, output_dir=str(tmp_path)))
    assert_same_bits(ours, megatron(4).run(trained, alone))
    assert ours[0]["counts"] == (7, 7)


def test_what_is_saved_or_evaluated_between_update_and_validation_is_final(megatron, tmp_path):
    alone = limited(replace(ALONE, steps=10), LIMITS["always"])
    ours = megatron(4).run(trained, replace(alone, section=SECTION, output_dir=str(tmp_path)), False, (4, 7, 9))
    assert_same_bits(ours, megatron(4).run(trained, alone, False, (4, 7, 9)))


def test_it_pauses_while_many_updates_are_made_again(megatron, tmp_path):
    alone = limited(replace(ALONE, steps=26), LIMITS["always"])
    ours = megatron(4).run(trained, replace(alone, section=SECTION, output_dir=str(tmp_path)), True)
    assert_same_bits(ours, megatron(4).run(trained, alone, True))
    assert ours[0]["counts"] == (post_validation._LOOKED_AT,) * 2
    assert sum("wait for the norm" in line for line in ours[0]["log"]) == 1


def killed(case: Case, killed_rank: int) -> None:
    """One rank ends after its update, before anybody knows whether it has to be made again; others end by an error."""
    chunks, optimizer, _ = start(case)
    try:
        for step in range(case.steps):
            zero_gradients(chunks, optimizer)
            run_batch(case, chunks, step, range(case.microbatches))
            optimizer.step()
            if step == 8 and torch.distributed.get_rank() == killed_rank:
                os._exit(7)
    except RuntimeError:
        os._exit(1)


@pytest.mark.parametrize("killed_rank", [0, 2])
def test_a_rank_that_is_killed_before_validation_leaves_nobody_waiting(tmp_path, killed_rank):
    case = limited(replace(CASE, output_dir=str(tmp_path)), LIMITS["always"])
    with fork_ranks(4, setup) as ranks, pytest.raises(RanksFailed) as caught:
        ranks.run(killed, case, killed_rank, timeout_s=60)
    codes = [7 if rank == killed_rank else 1 for rank in range(4)]
    assert str(caught.value).splitlines()[1::2] == [f"died with exit code {code}" for code in codes]


def overlap(case: Case) -> str:
    with EmulatedDevice(8e6):
        chunks, optimizer, adapter = start(case)
        for step in range(12):
            zero_gradients(chunks, optimizer)
            run_batch(case, chunks, step, range(case.microbatches))
            optimizer.step()
        found = adapter.controller.state.measurement.steps
        adapter.detach()
    return str(found)


def test_ranks_do_not_meet_for_the_norm(megatron, tmp_path):
    section = {**SECTION, "monitoring_steps": 8}
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
