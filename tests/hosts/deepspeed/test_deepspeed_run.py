"""Whole runs on DeepSpeed's engine: phases, identity with the host alone, checkpoints, failures, the report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import deepspeed.pipe
import pytest
import torch
from clocks import counted_time
from deepspeed_oracle import check_oracle
from deepspeed_ranks import CONTEXT, Case, batch, build_engine, force_plan, optimizer_state, parameters_of, train
from run_checks import assert_same

pytestmark = pytest.mark.distributed

HAS_DUALPIPEV = hasattr(deepspeed.pipe, "DualPipeVModule")  # from 0.19.8 on
ZERO1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}, **ZERO1, "data_types": {"grad_accum_dtype": "fp32"}}
BF16_ZERO = {**BF16, "data_types": {"grad_accum_dtype": "bf16"}}
PATHS = {
    "zero0": Case(),
    "zero1": Case(config=ZERO1),
    "bf16 optimizer": Case(config=BF16),
    "bf16 zero1": Case(config=BF16_ZERO),
}
if HAS_DUALPIPEV:
    PATHS |= {"dualpipev": Case(dualpipev=True), "dualpipev zero1": Case(dualpipev=True, config=ZERO1)}
FROZEN = {**{f"0B{m}": 1.0 for m in range(4)}, **{f"1B{m}": 0.75 for m in range(4)}}


# --- the whole life of a run ---------------------------------------------------------------------------------


def test_a_run_goes_through_all_phases_and_leaves_a_report(pools, tmp_path):
    section = {
        "warmup_steps": 1,
        "monitoring_steps": 6,
        "progressive_steps": 2,
        "replan_interval": 2,
        "replan_threshold": 0.0,
    }
    case = Case(section=section, steps=13, output_dir=str(tmp_path))
    ranks = pools(2).run(train, case)
    phases = [step["phase"] for step in ranks[0]["steps"]]
    assert phases == (["warmup"] + ["monitoring_upper", "monitoring_mixed"] * 3 + ["progressive"] * 2 + ["stable"] * 4)
    assert [rank["status"] for rank in ranks] == [None, None]
    assert ranks[0]["plan"] == ranks[1]["plan"]
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert report["plan"] == ranks[0]["plan"]
    assert report["host"]["name"] == "deepspeed"
    assert set(report["times"]) == {action for rank in report["schedule"]["ranks"] for action in rank}
    measured = report["measured"]
    assert measured["step_ms_unfrozen"] > 0
    assert measured["step_ms_stable"] > 0
    assert measured["step_ratio"] == pytest.approx(measured["step_ms_stable"] / measured["step_ms_unfrozen"])
    assert set(measured["mean_afr"]) == {"0", "1"}
    assert {sample["action"] for sample in measured["backward_ms"]} == {f"{s}B{m}" for s in (0, 1) for m in range(4)}


def test_the_papers_monitoring_freezes_nothing_then_all_but_part_of_stage_0(pools):
    ranks = pools(2).run(train, Case(section={"monitoring": "halves"}, steps=3))
    upper, lower = ranks[0]["steps"][1]["masks"], ranks[0]["steps"][2]["masks"]
    assert all(names == () for names in upper.values())
    stage_1 = set(ranks[1]["steps"][0]["before"])
    assert all(set(names) == stage_1 for (stage, _), names in lower.items() if stage == 1)
    stage_0 = set(ranks[0]["steps"][0]["before"])
    assert all(set(names) < stage_0 for (stage, _), names in lower.items() if stage == 0)


def test_the_translated_schedule_is_deepspeeds_1f1b(pools):
    ranks = pools(2).run(train, Case(steps=1))
    assert ranks[0]["schedule"] == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"],
    ]


@pytest.mark.skipif(not HAS_DUALPIPEV, reason="this DeepSpeed has no DualPipeV engine")
def test_dualpipev_goes_through_all_phases_with_two_stages_on_each_rank(pools, tmp_path):
    section = {"monitoring_steps": 6, "progressive_steps": 2, "replan_interval": 2, "replan_threshold": 0.0}
    case = Case(dualpipev=True, section=section, steps=13, output_dir=str(tmp_path))
    ranks = pools(2).run(train, case)
    assert [rank["status"] for rank in ranks] == [None, None]
    assert {action[0] for action in ranks[0]["schedule"][0]} == {"0", "3"}
    assert {action[0] for action in ranks[0]["schedule"][1]} == {"1", "2"}
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert set(report["measured"]["mean_afr"]) == {"0", "1", "2", "3"}
    assert max(report["plan"]["freeze_ratio"].values()) > 0.2


def test_gpipe_gives_the_losses_of_1f1b(pools):
    gpipe = pools(2).run(train, Case(section={"schedule": "gpipe", "method": "none", "max_freeze_ratio": 0.0}))
    alone = pools(2).run(train, Case(section=None))
    assert gpipe[0]["schedule"][1] == ["1F0", "1F1", "1F2", "1F3", "1B0", "1B1", "1B2", "1B3"]
    for ours, theirs in zip(gpipe[0]["steps"], alone[0]["steps"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


def test_warmup_auto_takes_the_schedulers(pools):
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.01}}
    case = Case(config={"scheduler": scheduler}, section={"warmup_steps": "auto"}, steps=4)
    phases = [step["phase"] for step in pools(2).run(train, case)[0]["steps"]]
    assert phases == ["warmup"] * 3 + ["monitoring_upper"]


# --- identity with the host alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_ratio_zero_is_bit_identical_to_the_host_alone(pools, path):
    case = replace(PATHS[path], section={"max_freeze_ratio": 0}, steps=8)
    assert_same(pools(2).run(train, case), pools(2).run(train, replace(case, section=None)))


@pytest.mark.parametrize("path", PATHS)
def test_after_detach_training_is_bit_identical_to_the_host_alone(pools, path, tmp_path):
    case = replace(PATHS[path], section={}, ratios=0.6, output_dir=str(tmp_path))
    detached, alone = zip(*pools(2).run(train_then_leave, case, str(tmp_path / "checkpoint")), strict=True)
    assert_same(list(detached), list(alone))


def train_then_leave(case: Case, folder: str) -> tuple[dict, dict]:
    """Freeze, detach, go on; and, from the checkpoint of that moment, an engine that was never attached."""
    import tf_adapters.deepspeed

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    force_plan(adapter.controller, case.ratios)
    losses(engine, case, range(3))
    adapter.detach()
    ours = {"_INSTRUCTION_MAP", "_exec_schedule", "save_checkpoint", "load_checkpoint", "timely_freeze"}
    assert ours.isdisjoint(vars(engine))
    engine.save_checkpoint(folder)
    other = build_engine(replace(case, section=None))
    other.load_checkpoint(folder)
    return after(engine, case), after(other, case)


def losses(engine: Any, case: Case, steps: range) -> list[float]:
    return [float(engine.train_batch(iter(batch(s, engine.grid.data_parallel_id, case.microbatches)))) for s in steps]


def after(engine: Any, case: Case) -> dict:
    return {
        "steps": [{"loss": x} for x in losses(engine, case, range(3, 6))],
        "parameters": parameters_of(engine),
    }


@pytest.mark.parametrize("path", PATHS)
def test_evaluation_between_training_batches_changes_nothing(pools, path):
    case = replace(PATHS[path], ratios=0.5, steps=3)
    with_evaluation = pools(2).run(evaluated, case)
    without = pools(2).run(train, case)
    for ours, theirs in zip(with_evaluation, without, strict=True):
        assert ours["losses"] == [s["loss"] for s in theirs["steps"]]
        assert ours["evaluations"][0] == ours["expected"]


def evaluated(case: Case) -> dict:
    import tf_adapters.deepspeed

    engine = build_engine(case)
    data = batch(99, 0, case.microbatches)
    expected = float(engine.eval_batch(iter(data)))
    adapter = tf_adapters.deepspeed.attach(engine)
    force_plan(adapter.controller, case.ratios)
    trained, evaluations = [], []
    for step in range(case.steps):
        evaluations.append(float(engine.eval_batch(iter(data))))
        trained += losses(engine, case, range(step, step + 1))
    return {"losses": trained, "evaluations": evaluations, "expected": expected}


# --- parameters that a whole step froze ----------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [2, 4])
def test_parameters_frozen_in_every_microbatch_do_not_move_and_keep_their_state(pools, path, size):
    ranks = pools(size).run(train, replace(PATHS[path], ratios=FROZEN, steps=4))
    frozen_moved = trained_moved = 0
    for rank in ranks:
        stage = rank["stage"]
        for step in rank["steps"]:
            masks = [set(names) for (s, _), names in step["masks"].items() if s == stage]
            held = set.intersection(*masks)
            for name, before in step["state_before"].items():
                now = step["state_after"][name]
                same = all(torch.equal(now[k], before[k]) for k in before if k != "step" and k in now)
                frozen_moved += name in held and not same
                trained_moved += name not in held and not same
    assert frozen_moved == 0
    assert trained_moved > 0


def test_stage_0_frozen_whole_does_not_move_at_all(pools):
    rank = pools(2).run(train, Case(ratios=FROZEN))[0]
    first = rank["steps"][0]["before"]
    assert all(torch.equal(rank["parameters"][name], value) for name, value in first.items())


# --- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_checkpoint_in_mid_ramp_resumes_the_same_phase_plan_and_masks(pools, path, tmp_path):
    section = {"warmup_steps": 1, "monitoring_steps": 2, "progressive_steps": 6}
    case = replace(PATHS[path], section=section, output_dir=str(tmp_path))
    for through, resumed in pools(2).run(interrupted, case, str(tmp_path / "checkpoint")):
        assert resumed == through


def interrupted(case: Case, folder: str) -> tuple[Any, Any]:
    import tf_adapters.deepspeed

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    losses(engine, case, range(5))
    engine.save_checkpoint(folder, client_state={"mine": 1})
    through = what_follows(engine, adapter, case)
    other = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(other)
    _, client_state = other.load_checkpoint(folder)
    assert client_state["mine"] == 1
    assert "timely_freeze" not in client_state
    return through, what_follows(other, adapter, case)


def what_follows(engine: Any, adapter: Any, case: Case) -> Any:
    controller = adapter.controller
    start, phase = controller.step, controller.phase
    masks = [controller.frozen_parameters(t, s, m) for t in range(start, 12) for s in (0, 1) for m in range(4)]
    return start, phase, controller.state.plan.to_json(), masks, losses(engine, case, range(5, 9))


def test_a_checkpoint_without_freezing_starts_from_the_beginning(pools, tmp_path):
    case = Case(section={"warmup_steps": "auto"}, output_dir=str(tmp_path))
    assert pools(2).run(resumed_from_plain, case, str(tmp_path / "checkpoint")) == [(1, 10), (1, 10)]


def resumed_from_plain(case: Case, folder: str) -> tuple[int, int]:
    import tf_adapters.deepspeed

    plain = build_engine(replace(case, section=None))
    losses(plain, case, range(2))
    plain.save_checkpoint(folder)
    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    engine.load_checkpoint(folder)
    losses(engine, case, range(0))
    return adapter.controller.step, adapter.controller.state.phases.warmup_end


# --- changes and failures ------------------------------------------------------------------------------------


MIXED = (4, 6, 8)
WHOLE_LIFE = {"warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 2}
EXACT = {**WHOLE_LIFE, "max_freeze_ratio": 0, "weight_gradients": "deferred"}
DRAWN = {**WHOLE_LIFE, "granularity": "token", "weight_gradients": "deferred"}


def train_in_counted_time(case: Case) -> dict[str, Any]:
    with counted_time():
        return train(case)


@pytest.mark.parametrize("section", [WHOLE_LIFE, DRAWN], ids=["tensors", "deferred tokens"])
def test_numbers_of_microbatches_that_change_are_monitored_together_and_planned_for_apart(pools, section, tmp_path):
    case = Case(section=section, numbers=MIXED, steps=14, output_dir=str(tmp_path))
    ranks = pools(4).run(train_in_counted_time, case)
    check_oracle(case, ranks)
    phases = ["warmup", *["monitoring_upper", "monitoring_mixed"] * 2, *["progressive"] * 2, *["stable"] * 7]
    for rank in ranks:
        assert (rank["status"], rank["numbers"]) == (None, [4, 6, 8])
        assert [step["phase"] for step in rank["steps"]] == phases
        assert [step["masks"] for step in rank["steps"]] == [step["masks"] for step in ranks[0]["steps"]]
        last = rank["steps"][-3:]
        assert [len(step["masks"]) for step in last] == [2 * case.microbatches_in(step) for step in range(11, 14)]
        assert section is DRAWN or all(any(step["masks"].values()) for step in last)
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert {action for row in report["schedule"]["ranks"] for action in row} == set(report["times"])


def test_numbers_of_microbatches_that_change_are_the_host_to_the_bit_where_nothing_is_frozen(pools):
    case = Case(section=EXACT, numbers=MIXED, steps=11)
    ours = pools(2).run(train, case)
    assert ours[0]["numbers"] == [4, 6, 8]
    assert_same(ours, pools(2).run(train, replace(case, section=None)))


def test_a_checkpoint_of_changing_numbers_resumes_all_their_plans(pools, tmp_path):
    case = Case(section=WHOLE_LIFE, numbers=MIXED, output_dir=str(tmp_path))
    for through, resumed in pools(2).run(interrupted_while_mixed, case, str(tmp_path / "checkpoint")):
        assert resumed == through


def interrupted_while_mixed(case: Case, folder: str) -> tuple[Any, Any]:
    import tf_adapters.deepspeed

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    mixed_losses(engine, case, range(10))
    engine.save_checkpoint(folder)
    through = mixed_losses(engine, case, range(10, 16)), sorted(adapter.controller.state.plans.of)
    other = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(other)
    other.load_checkpoint(folder)
    return through, (mixed_losses(other, case, range(10, 16)), sorted(adapter.controller.state.plans.of))


def mixed_losses(engine: Any, case: Case, steps: range) -> list[float]:
    found = []
    for step in steps:
        engine.set_train_batch_size(case.microbatches_in(step) * engine.train_micro_batch_size_per_gpu())
        found.append(float(engine.train_batch(iter(batch(step, 0, case.microbatches_in(step))))))
    return found


def test_shorter_sequences_in_mid_run_train_on_under_the_same_plan(pools):
    """As in curriculum learning, which tells the engine so."""
    for failure, phase, finite, frozen, same_plan in pools(2).run(shortened, Case(ratios=0.5)):
        assert failure is None
        assert phase == "stable"
        assert finite
        assert frozen
        assert same_plan


def shortened(case: Case) -> tuple[str | None, str, bool, bool, bool]:
    import tf_adapters.deepspeed

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    force_plan(adapter.controller, case.ratios)
    losses, plan = [], None
    for step in range(10):
        samples = batch(step, 0, engine.micro_batches)
        if step == 7:
            engine.reset_activation_shape()
            plan = adapter.controller.state.plan
        if step >= 7:
            samples = [(tokens[:, : CONTEXT // 2], labels[:, : CONTEXT // 2]) for tokens, labels in samples]
        losses.append(float(engine.train_batch(iter(samples))))
    controller = adapter.controller
    frozen = any(controller.frozen_parameters(controller.step, stage, 0) for stage in (0, 1))
    same_plan = plan is not None and controller.state.plan is plan
    return controller.state.failure, controller.phase.value, all(map(math.isfinite, losses)), frozen, same_plan


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_failing_solver_is_the_same_on_all_ranks(pools, on_error):
    case = Case(section={"on_error": on_error}, steps=6)
    outcome = pools(2).run(with_broken_solver, case)
    errors, masks = zip(*outcome, strict=True)
    assert errors[0] == errors[1]
    if on_error == "raise":
        assert errors[0] == "RemoteError: RuntimeError: the solver broke"
    else:
        assert errors[0] is None
        assert masks[0] == masks[1] == 0


def with_broken_solver(case: Case) -> tuple[str | None, int]:
    import tf_adapters.deepspeed
    import tf_adapters.training.plan_maker

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the solver broke")

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    original, tf_adapters.training.plan_maker.solve = tf_adapters.training.plan_maker.solve, broken
    try:
        losses(engine, case, range(case.steps))
    except Exception as error:
        return f"{type(error).__name__}: {error}", -1
    finally:
        tf_adapters.training.plan_maker.solve = original
    controller = adapter.controller
    frozen = [controller.frozen_parameters(t, s, m) for t in range(1, 20) for s in (0, 1) for m in range(4)]
    return None, sum(map(len, frozen))


def test_a_schedule_that_runs_otherwise_is_found_in_the_first_monitored_step(pools):
    outcome = pools(2).run(with_another_schedule, Case(steps=2))
    assert outcome[0] == outcome[1]
    ran, expected = outcome[0].split("The schedule is:")
    assert " ".join(ran.split()).count("1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3") == 1
    assert "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3" in " ".join(expected.split())


def with_another_schedule(case: Case) -> str:
    import tf_adapters.deepspeed
    from tf_adapters.deepspeed.schedules import GPipeSchedule

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    adapter._schedule_type = GPipeSchedule
    try:
        losses(engine, case, range(case.steps))
    except Exception as error:
        return str(error)
    return "no error"


def test_an_error_of_the_users_leaves_no_parameter_frozen(pools):
    assert pools(1).run(interrupted_by_user, Case(stages=1, ratios=0.9)) == [True]


def interrupted_by_user(case: Case) -> bool:
    import tf_adapters.deepspeed

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    force_plan(adapter.controller, case.ratios)
    with pytest.raises(StopIteration):
        engine.train_batch(iter(batch(0, 0, 2)))  # two of four microbatches
    return all(p.requires_grad for p in engine.module.parameters())


# --- what the user sees --------------------------------------------------------------------------------------


def test_metrics_go_through_deepspeeds_monitor(pools, tmp_path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    pools(2).run(train, Case(config=monitor, output_dir=str(tmp_path)))
    written = {path.name for path in (tmp_path / "job").iterdir()}
    assert {f"TimelyFreeze_{n}.csv" for n in ("afr_stage_0", "afr_stage_1", "step_ms", "planned_step_ms")} <= written


def test_optimizer_state_is_found_by_name(pools):
    """The helpers above must see the state that they compare."""
    for state in pools(2).run(momentum_names, Case(config=ZERO1, steps=2)):
        assert {"value", "exp_avg", "exp_avg_sq"} <= state


def momentum_names(case: Case) -> set[str]:
    engine = build_engine(replace(case, section=None))
    losses(engine, case, range(1))
    return set.intersection(*map(set, optimizer_state(engine).values()))
