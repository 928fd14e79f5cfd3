"""Whole runs on torch's schedules: phases, identity with the host alone, checkpoints, failures, the report."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from run_checks import assert_same
from torch_ranks import SCHEDULES, Case, Run, attached, build, losses_of, made, optimizer_state, pool, train, values

pytestmark = pytest.mark.distributed

LIFE = {"warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 2, "replan_interval": 2, "replan_threshold": 0.0}
PHASES = ["warmup", *["monitoring_upper", "monitoring_mixed"] * 2, *["progressive"] * 2, *["stable"] * 2]
FROZEN = {"0": 1.0, "1": 0.75, "2": 0.75, "3": 0.75}
HOSTS = {
    "1f1b": Case(),
    "zbv": Case(schedule="ScheduleZBVZeroBubble"),
    "dualpipev": Case(schedule="ScheduleDualPipeV"),
    "ddp": Case(replicas="ddp"),
    "fsdp": Case(replicas="fsdp nested"),
}
# The contract has 1F1B without replicas, and the other ways of freezing nothing.
beside_the_contract = pytest.mark.parametrize("name", [name for name in HOSTS if name != "1f1b"])


def run_on(case: Case, function: Any = train, *args: Any) -> list[Any]:
    return pool(4 if case.replicas else case.ranks).run(function, case, *args)


# --- the whole life of a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_goes_through_all_phases_and_leaves_a_report(schedule: str, tmp_path: Any) -> None:
    case = life(tmp_path, schedule=schedule)
    check_life(case, pool(2).run(train, case), tmp_path)


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_a_schedule_from_a_file_runs_the_same_way(form: Any, tmp_path: Any) -> None:
    file = tmp_path / f"{form}.csv"
    made("ScheduleZBVZeroBubble", 2, Case().microbatches)._dump_csv(file, format=form)
    case = life(tmp_path, schedule="ScheduleZBVZeroBubble", csv=str(file))
    check_life(case, pool(2).run(train, case), tmp_path)


def test_the_metadata_pass_may_come_in_a_masked_step() -> None:
    """A resumed run's first step is masked; what it keeps of requires_grad serves the unmasked steps after it."""
    plans = (1.0, 0.0)
    for schedule in ("Schedule1F1B", "ScheduleZBVZeroBubble"):
        for rank in pool(2).run(train, Case(schedule=schedule, ratios=plans, steps=2)):
            first, second = (step["gradients"] for step in rank["steps"])
            assert all(gradient.norm() == 0 for gradient in first.values())
            assert all(gradient.norm() > 0 for gradient in second.values())


def life(folder: Any, **settings: Any) -> Case:
    return Case(section=LIFE, steps=len(PHASES), recorded=False, output_dir=str(folder), **settings)


def check_life(case: Case, ranks: list[dict[str, Any]], folder: Any) -> None:
    for rank in ranks:
        assert [step["phase"] for step in rank["steps"]] == PHASES
        assert rank["failure"] is None  # what ran in the first monitored step was the schedule
        assert rank["plan"] == ranks[0]["plan"]
    report = json.loads((folder / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert report["plan"] == ranks[0]["plan"]
    assert report["host"] == {"name": "torch.distributed.pipelining", "version": torch.__version__, "device": "cpu"}
    assert report["schedule"]["ranks"] == ranks[0]["schedule"]
    assert set(report["times"]) == {action for rank in ranks[0]["schedule"] for action in rank}
    assert report["measured"]["step_ms_unfrozen"] > 0
    assert report["measured"]["step_ms_stable"] > 0
    assert set(report["measured"]["mean_afr"]) == {str(stage) for stage in range(case.stages)}


# --- identity with the host alone ----------------------------------------------------------------------------


@beside_the_contract
def test_freezing_nothing_is_bit_identical_to_the_host_alone(name: str) -> None:
    case = replace(HOSTS[name], section={"max_freeze_ratio": 0}, steps=6, recorded=False)
    assert_same(run_on(case), run_on(replace(case, section=None)))


@beside_the_contract
def test_after_detach_training_is_bit_identical_to_the_host_alone(name: str, tmp_path: Any) -> None:
    case = replace(HOSTS[name], ratios=0.6, output_dir=str(tmp_path))
    for detached, alone, restored in run_on(case, train_then_leave):
        assert restored
        assert_same([detached], [alone])


def train_then_leave(case: Case) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Freeze, detach, go on; and a pipeline that was never attached, from the same moment on."""
    run, other = build(case), build(case)
    before = [set(vars(owner)) for owner in (run.schedule, *run.stages)]
    attach(run)
    losses_of(run, range(3))
    run.adapter.detach()
    restored = [set(vars(owner)) for owner in (run.schedule, *run.stages)] == before
    restored &= not any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in run.optimizers)
    run.adapter = None
    losses_of(other, range(1))  # its first step measures shapes, as the other's did
    take_over(other, run)
    return after(run), after(other), restored


def attach(run: Run) -> None:
    import tf_adapters.torch_pipelining

    run.adapter = tf_adapters.torch_pipelining.attach(run.schedule, run.case.settings(), optimizer=run.optimizers)
    run.force_plan(0)


def take_over(target: Run, source: Run) -> None:
    """Parameters, gradients and optimizer state of another run of the same case."""
    for to, of in zip(target.stages, source.stages, strict=True):
        to.submod.load_state_dict(of.submod.state_dict())
    for to, of in zip(target.optimizers, source.optimizers, strict=True):
        to.load_state_dict(copy.deepcopy(of.state_dict()))


def after(run: Run) -> dict[str, Any]:
    return {"steps": [{"loss": loss} for loss in losses_of(run, range(3, 6))], "parameters": values(run)}


def test_evaluation_sees_the_whole_model() -> None:
    """The same loss with freezing as without, on the last rank."""
    losses = [evaluated for _, evaluated in (pool(2).run(evaluated_once, Case(section=s)) for s in (None, {}))]
    assert losses[0] == losses[1] > 0


def evaluated_once(case: Case) -> float:
    run = attached(replace(case, ratios=0.9 if case.section is not None else None))
    return run.evaluate(0)


# --- parameters that a whole step froze ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optimizer", "set_to_none"),
    [
        *((name, "AdamW", False) for name in HOSTS),
        ("1f1b", "AdamW", True),
        ("1f1b", "SGD", False),
        ("ddp", "SGD", True),
    ],
)
def test_parameters_frozen_in_every_microbatch_keep_value_and_state(
    name: str, optimizer: str, set_to_none: bool
) -> None:
    # the first step trains everything, so that there is state to keep
    plans = (0.0, FROZEN, FROZEN)
    case = replace(HOSTS[name], ratios=plans, set_to_none=set_to_none, optimizer=optimizer, state=True)
    held_count = moved_count = 0
    for rank in run_on(case):
        for step in rank["steps"]:
            by_stage: dict[int, list[set[str]]] = {}
            for (stage, _), names in step["masks"].items():
                by_stage.setdefault(stage, []).append(set(names))
            held = {name for masks in by_stage.values() for name in set.intersection(*masks)}
            for parameter, before in step["state_before"].items():
                now = step["state_after"][parameter]
                same = before.keys() == now.keys() and all(torch.equal(now[key], before[key]) for key in before)
                assert same or parameter not in held, parameter
                held_count += parameter in held
                moved_count += not same
    assert held_count > 0
    assert moved_count > 0


def test_without_an_optimizer_every_batch_is_a_step(tmp_path: Any) -> None:
    case = replace(life(tmp_path, batches=2, give_optimizer=False), steps=4)
    for rank in pool(2).run(train, case):
        assert rank["step"] == 9
        assert rank["failure"] is None


def test_a_step_ends_once_for_several_batches(tmp_path: Any) -> None:
    case = life(tmp_path, schedule="ScheduleInterleaved1F1B", batches=2)
    check_life(case, pool(2).run(train, case), tmp_path)


# --- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dualpipev", "fsdp"])
def test_a_checkpoint_in_mid_ramp_resumes_the_same_phase_plan_and_masks(name: str, tmp_path: Any) -> None:
    section = {"warmup_steps": 1, "monitoring_steps": 2, "progressive_steps": 6}
    case = replace(HOSTS[name], section=section, output_dir=str(tmp_path))
    for through, resumed in run_on(case, interrupted, str(tmp_path / "checkpoint")):
        assert resumed == through


def interrupted(case: Case, folder: str) -> tuple[Any, Any]:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.stateful import Stateful

    run = attached(case)
    assert isinstance(run.adapter, Stateful)
    losses_of(run, range(5))
    checkpoint.save({"freezing": run.adapter}, checkpoint_id=folder)
    other = attached(case)
    take_over(other, run)
    through = what_follows(run)
    checkpoint.load({"freezing": other.adapter}, checkpoint_id=folder)
    return through, what_follows(other)


def what_follows(run: Run) -> Any:
    controller = run.adapter.controller
    start, phase = controller.step, controller.phase
    stages, microbatches = range(run.case.stages), range(run.case.microbatches)
    masks = [controller.frozen_parameters(t, s, m) for t in range(start, 12) for s in stages for m in microbatches]
    return start, phase, controller.state.plan.to_json(), masks, losses_of(run, range(5, 9))


def test_a_checkpoint_without_freezing_starts_from_the_beginning() -> None:
    assert pool(2).run(resumed_from_nothing, Case(section={"warmup_steps": "auto"}, ratios=0.5)) == [(1, 10)] * 2


def resumed_from_nothing(case: Case) -> tuple[int, int]:
    run = attached(case)
    run.adapter.load_state_dict({})
    return run.adapter.controller.step, run.adapter.controller.state.phases.warmup_end


# --- failures ------------------------------------------------------------------------------------------------


def test_a_schedule_that_runs_otherwise_is_found_in_the_first_monitored_step() -> None:
    texts = pool(2).run(with_another_schedule, Case(), "gpipe")
    assert texts[0] == texts[1]
    ran, expected = (" ".join(text.split()) for text in texts[0].split("The schedule is:"))
    assert ran.startswith("ScheduleError: the ranks did not run the schedule")
    assert "1F0 1B0 1F1 1B1 1F2 1B2" in ran
    assert "1F0 1F1 1F2 1F3 1B0" in expected


def test_torchs_own_wrong_order_never_gets_as_far_as_training() -> None:
    texts = pool(2).run(with_another_schedule, Case(), "pipeline_order")
    assert texts == ["ScheduleError: 0F4 is missing: stage 0 never runs microbatch 4"] * 2


def with_another_schedule(case: Case, instead: str) -> str:
    from tf_adapters.torch_pipelining import adapter, schedules

    def translate(schedule: Any) -> Any:
        if instead == "pipeline_order":
            return schedules.from_action_lists(schedule.pipeline_order)
        return schedules.from_action_lists(made("ScheduleGPipe", case.ranks, case.microbatches).pipeline_order)

    original, adapter.translate = adapter.translate, translate
    try:
        losses_of(attached(case), range(3))  # the ranks compare what they ran before the next batch
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        adapter.translate = original
    return "no error"


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_failing_solver_is_the_same_on_all_ranks(on_error: str) -> None:
    outcome = pool(2).run(with_broken_solver, Case(section={"on_error": on_error}))
    if on_error == "raise":
        assert outcome == [("RemoteError: RuntimeError: the solver broke", -1)] * 2
    else:
        assert outcome == [(None, 0)] * 2


def with_broken_solver(case: Case) -> tuple[str | None, int]:
    import tf_adapters.training.plan_maker

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the solver broke")

    run = attached(case)
    original, tf_adapters.training.plan_maker.solve = tf_adapters.training.plan_maker.solve, broken
    try:
        losses_of(run, range(6))
    except Exception as error:
        return f"{type(error).__name__}: {error}", -1
    finally:
        tf_adapters.training.plan_maker.solve = original
    return None, sum(len(run.adapter.controller.frozen_parameters(t, 1, 0)) for t in range(1, 20))


def test_an_error_of_the_users_leaves_no_parameter_frozen_and_training_can_go_on() -> None:
    """Two pipelines of one rank each: an error on one rank of a longer one would leave the other waiting."""
    assert pool(2).run(interrupted_by_user, Case(ranks=1, ratios=0.9)) == [(True, True)] * 2


def interrupted_by_user(case: Case) -> tuple[bool, bool]:
    run = attached(case)
    loss_fn, run.schedule._loss_fn = run.schedule._loss_fn, None
    run.schedule._loss_fn = lambda *_: (_ for _ in ()).throw(KeyError("mine"))
    try:
        run.train_step(0)
    except Exception as error:
        raised = "mine" in repr(error)
    run.schedule._loss_fn = loss_fn
    trainable = all(p.requires_grad for p in run.named.values())
    return raised and trainable, run.train_step(1) > 0


@pytest.mark.parametrize("replicas", ["fsdp", "fsdp kept"])
def test_what_the_user_freezes_after_attach_does_not_move(replicas: str) -> None:
    """FSDP computes with parameters of its own, whose flags are set apart from those that the user sees."""
    case = Case(ranks=1, ratios=0.5, replicas=replicas, recorded=False)
    for moved, others_moved, trains in pool(2).run(frozen_by_the_user, case):
        assert (moved, trains) == (0.0, False)
        assert others_moved > 0.0


def frozen_by_the_user(case: Case) -> tuple[float, float, bool]:
    """How far a parameter moves that the user has frozen, how far the others do, and whether it trains."""
    run = attached(case)
    run.train_step(0)
    chosen = next(name for name in run.named if name.endswith("2.up.weight"))
    run.named[chosen].requires_grad_(False)
    before = values(run)
    losses_of(run, range(1, 5))
    moved = {name: float((after - before[name]).abs().max()) for name, after in values(run).items()}
    return moved.pop(chosen), max(moved.values()), run.named[chosen].requires_grad


# --- what the user sees --------------------------------------------------------------------------------------


def test_metrics_come_after_every_step_even_if_their_function_fails_on_one_rank() -> None:
    for figures in pool(2).run(measured, Case(section=LIFE)):
        assert len(figures) == 6
        assert set().union(*figures) == {"afr_stage_0", "afr_stage_1", "step_ms", "planned_step_ms"}


def measured(case: Case) -> list[dict[str, float]]:
    import tf_adapters.torch_pipelining

    run = build(case)
    seen: list[dict[str, float]] = []

    def take(figures: Mapping[str, float]) -> None:
        seen.append(dict(figures))
        if torch.distributed.get_rank() == 1:
            raise OSError("no space left on device")

    tf_adapters.torch_pipelining.attach(run.schedule, case.settings(), optimizer=run.optimizers, metrics=take)
    losses_of(run, range(6))
    return seen


@pytest.mark.parametrize("method", ["apf", "timely+apf"])
def test_figures_are_what_the_masks_of_the_step_froze(method: str) -> None:
    section = {**LIFE, "method": method, "stability_check_interval": 1, "apf_threshold": 0.4}
    ranks = pool(2).run(frozen, Case(section=section))
    shares = {stage: of_stage for rank in ranks for stage, of_stage in rank["shares"].items()}
    for rank in ranks:
        assert {s: [figures[f"afr_stage_{s}"] for figures in rank["figures"]] for s in shares} == shares
    assert any(len({*of_stage}) > 1 for of_stage in shares.values())


def frozen(case: Case) -> dict[str, Any]:
    import tf_adapters.torch_pipelining

    run = build(case)
    figures: list[dict[str, float]] = []
    adapter = tf_adapters.torch_pipelining.attach(
        run.schedule, case.settings(), optimizer=run.optimizers, metrics=lambda step: figures.append(dict(step))
    )
    shares: dict[int, list[float]] = {stage: [] for stage in adapter.controller.parameter_masks}
    close_step = adapter.controller.close_step

    def recorded() -> None:
        number = adapter.controller.schedule.num_microbatches
        for stage, of_stage in shares.items():
            of_stage.append(sum(adapter.controller.mask(stage, m).share for m in range(number)) / number)
        close_step()

    adapter.controller.close_step = recorded
    losses_of(run, range(8))
    return {"shares": shares, "figures": figures}


def test_optimizer_state_is_found_by_name() -> None:
    """The helpers above must see the state that they compare."""
    for names in pool(2).run(state_names, Case(section=None)):
        assert names == {"value", "step", "exp_avg", "exp_avg_sq"}


def state_names(case: Case) -> set[str]:
    run = build(case)
    losses_of(run, range(1))
    return set.intersection(*map(set, optimizer_state(run).values()))
