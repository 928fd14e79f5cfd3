"""Updates before the norm is known on DeepSpeed's engine: the trained weights are those of updates after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed_post_validation import assert_same_bits, limited, trained, values
from deepspeed_ranks import Case, batch, build_engine, setup
from overlapping_steps import POST_VALIDATED
from post_validated_runs import ALWAYS, HALF, assert_counted, assert_nobody_waits, train_until_killed
from rank_pools import fork_ranks

from tf_adapters.errors import UnsupportedError
from tf_adapters.hosts import post_validation
from tf_adapters.testing.emulated_device import EmulatedDevice

pytestmark = pytest.mark.distributed

ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
BF16 = {"bf16": {"enabled": True}}
SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 12, "warmup_max_lr": 1e-2}}}
CONFIG = {"gradient_accumulation_steps": 8, **SCHEDULER, **ZERO}
ALONE = Case(stages=4, config=CONFIG, section=None, steps=16)
BF16_OPTIMIZER = {**CONFIG, **BF16, "data_types": {"grad_accum_dtype": "fp32"}}
OPTIMIZERS = {"ZeRO": CONFIG, "ZeRO in bf16": {**CONFIG, **BF16}, "BF16_Optimizer": BF16_OPTIMIZER}
CASE = replace(ALONE, section=POST_VALIDATED)
LIMITS = {"never": 1e6, "always": ALWAYS, HALF: 0.575}
STEPS = {HALF: 40}
OTHERS: dict[str, dict[str, Any]] = {
    "BF16_Optimizer": {"config": BF16_OPTIMIZER},
    "ZeRO in bf16": {"config": OPTIMIZERS["ZeRO in bf16"]},
    "ZeRO in bf16, unchecked": {"config": {**CONFIG, "bf16": {"enabled": True, "check_grad_overflow": False}}},
    "replicas": {"stages": 2},
    "replicas, BF16_Optimizer": {"stages": 2, "config": BF16_OPTIMIZER},
    "tied": {"tied": True},
}


@pytest.mark.parametrize("limit", LIMITS)
def test_the_weights_are_those_of_updates_after_the_norm(pools, tmp_path, limit):
    alone = limited(replace(ALONE, steps=STEPS.get(limit, ALONE.steps)), LIMITS[limit])
    case = replace(alone, section=POST_VALIDATED, output_dir=str(tmp_path))
    ours = pools(4).run(trained, case)
    assert_same_bits(ours, pools(4).run(trained, alone))
    assert_counted(ours, case.steps, limit, tmp_path)
    assert all(rank["copies"] > 0 for rank in ours)


@pytest.mark.parametrize("other", OTHERS)
def test_other_optimizers_and_models(pools, tmp_path, other):
    alone = limited(replace(ALONE, steps=8, **OTHERS[other]), LIMITS["always"])
    ours = pools(4).run(trained, replace(alone, section=POST_VALIDATED, output_dir=str(tmp_path)))
    assert_same_bits(ours, pools(4).run(trained, alone))
    assert ours[0]["counts"] == (7, 7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gpipe(pools, tmp_path, optimizer):
    """All forwards run before the last update is known to be right."""
    alone = limited(replace(ALONE, config=OPTIMIZERS[optimizer], steps=8), LIMITS["always"])
    ours = pools(4).run(
        trained, replace(alone, section={**POST_VALIDATED, "schedule": "gpipe"}, output_dir=str(tmp_path))
    )
    assert_same_bits(ours, pools(4).run(trained, alone))
    assert ours[0]["counts"] == (7, 7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_that_the_host_skips_is_taken_back(pools, tmp_path, optimizer):
    """Infinite gradients on one rank alone: no rank updates, and the learning rate does not move on."""
    alone, how = replace(ALONE, steps=10, config=OPTIMIZERS[optimizer]), (False, (), (4, 7))
    ours = pools(4).run(trained, replace(alone, section=POST_VALIDATED, output_dir=str(tmp_path)), *how)
    assert_same_bits(ours, pools(4).run(trained, alone, *how))
    assert ours[0]["counts"] == (9, 2)
    assert ours[0]["skipped"] == 2


def test_what_is_saved_or_evaluated_between_update_and_validation_is_final(pools, tmp_path):
    alone, saved = limited(replace(ALONE, steps=10), LIMITS["always"]), (4, 7, 9)
    ours = pools(4).run(
        trained,
        replace(alone, section=POST_VALIDATED, output_dir=str(tmp_path)),
        False,
        saved,
        (),
        str(tmp_path / "checkpoints"),
    )
    assert_same_bits(ours, pools(4).run(trained, alone, False, saved))


def resumed(case: Case, directory: str) -> list[torch.Tensor]:
    """Go back to an earlier checkpoint when the last update has to be made again."""
    import tf_adapters.deepspeed

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    for step in range(10):
        engine.train_batch(iter(batch(step, engine.grid.data_parallel_id, case.microbatches)))
        if step == 4:
            engine.save_checkpoint(directory, tag="early")
        if step == 7:
            engine.load_checkpoint(directory, tag="early")
    if adapter is not None:
        adapter.detach()
    return values(engine)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_that_is_loaded_before_validation_stays(pools, tmp_path, optimizer):
    alone = limited(replace(ALONE, config=OPTIMIZERS[optimizer]), LIMITS["always"])
    case = replace(alone, section=POST_VALIDATED, output_dir=str(tmp_path))
    ours = pools(4).run(resumed, case, str(tmp_path / "ours"))
    for mine, theirs in zip(ours, pools(4).run(resumed, alone, str(tmp_path / "alone")), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_it_pauses_while_many_updates_are_made_again(pools, tmp_path):
    alone = limited(replace(ALONE, steps=26), LIMITS["always"])
    ours = pools(4).run(trained, replace(alone, section=POST_VALIDATED, output_dir=str(tmp_path)), True)
    assert_same_bits(ours, pools(4).run(trained, alone, True))
    assert ours[0]["counts"] == (post_validation._LOOKED_AT,) * 2
    assert sum("wait for the norm" in line for line in ours[0]["log"]) == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_that_a_step_holds_are_held_when_it_is_made_again(pools, tmp_path, optimizer):
    section = {**POST_VALIDATED, "max_freeze_ratio": 1.0}
    case = replace(CASE, config=OPTIMIZERS[optimizer], steps=8, ratios=0.95, section=section)
    late = limited(replace(case, output_dir=str(tmp_path / "late")), ALWAYS)
    after = replace(late, section={**section, "optimizer_step": "synchronous"}, output_dir=str(tmp_path / "after"))
    ours = pools(4).run(trained, late)
    assert_same_bits(ours, pools(4).run(trained, after))
    assert ours[0]["counts"] == (7, 7)
    assert all(rank["held"] for rank in ours)


def lone_read(case: Case) -> str:
    """One replica reads weights while the others do not."""
    import tf_adapters.deepspeed

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    replica = engine.grid.data_parallel_id
    for step in range(6):
        engine.train_batch(iter(batch(step, replica, case.microbatches)))
    said = ""
    if replica == 0:
        try:
            engine.module.state_dict()
        except RuntimeError as error:
            said = str(error)
    torch.distributed.barrier()
    adapter.settle()
    engine.module.state_dict()
    adapter.detach()
    return said


def test_a_read_on_one_replica_does_not_wait_for_the_others(pools, tmp_path):
    case = replace(CASE, stages=2, output_dir=str(tmp_path))
    said = pools(4).run(lone_read, limited(case, LIMITS["always"]))
    assert sum("call engine.timely_freeze.settle() on all ranks first" in line for line in said) == 2
    assert pools(4).run(lone_read, limited(case, LIMITS["never"])) == [""] * 4


def killed(case: Case, killed_rank: int) -> None:
    import tf_adapters.deepspeed

    engine = build_engine(case)
    tf_adapters.deepspeed.attach(engine)
    train_until_killed(
        lambda step: engine.train_batch(iter(batch(step, 0, case.microbatches))), case.steps, killed_rank
    )


@pytest.mark.parametrize("killed_rank", [0, 2])
def test_a_rank_that_is_killed_before_validation_leaves_nobody_waiting(tmp_path, killed_rank):
    case = limited(replace(CASE, output_dir=str(tmp_path)), LIMITS["always"])
    with fork_ranks(4, setup) as ranks:
        assert_nobody_waits(ranks, killed, case, killed_rank)


def overlap(case: Case) -> str:
    import tf_adapters.deepspeed

    with EmulatedDevice(2e6):
        engine = build_engine(case)
        adapter = tf_adapters.deepspeed.attach(engine)
        for step in range(14):
            engine.train_batch(iter(batch(step, 0, case.microbatches)))
        found = adapter.controller.state.measurement.steps
        adapter.detach()
    return str(found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_do_not_meet_for_the_norm(pools, tmp_path, optimizer):
    section = {**POST_VALIDATED, "monitoring_steps": 8}
    case = limited(
        replace(CASE, config=OPTIMIZERS[optimizer], section=section, output_dir=str(tmp_path)), LIMITS["never"]
    )
    assert pools(4).run(overlap, case) == ["overlap"] * 4


def refused(case: Case) -> str:
    import tf_adapters.deepspeed

    try:
        tf_adapters.deepspeed.attach(build_engine(case))
    except UnsupportedError as error:
        return str(error)
    return ""


REFUSED = {
    "stage 0": ({"config": {"gradient_accumulation_steps": 8}}, "needs ZeRO stage 1 or bf16's optimizer"),
    "shapes": ({"dynamic_shape": True}, "dynamic_shape is True"),
    "sums in bf16": (
        {"config": {"gradient_accumulation_steps": 8, **BF16}},
        "gradients are accumulated in bf16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_again_is_refused_in_one_line(pools, name):
    how, words = REFUSED[name]
    for line in pools(2).run(refused, replace(CASE, stages=2, **how)):
        assert words in line
        assert "\n" not in line
