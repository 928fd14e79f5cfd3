"""Whole runs in Megatron-Core: phases, identity with the host alone, held parameters, resuming, failures."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from clocks import counted_time
from logged import Lines
from megatron_oracle import check_oracle
from megatron_ranks import (
    CONTEXT,
    Case,
    all_masks,
    build_chunks,
    build_optimizer,
    by_name,
    force_plan,
    initialize,
    run_batch,
    start,
    train,
    train_step,
    values,
    zero_gradients,
)
from megatron_reductions import reductions

from tf_adapters.testing import RanksFailed

pytestmark = pytest.mark.distributed

BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
BF16_OPTIMIZER = {"bf16": True, "params_dtype": torch.bfloat16}
SHARDED = {"use_distributed_optimizer": True}
GATHER = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
PATHS = {
    "fp32": Case(),
    "bf16": Case(model=BF16, optimizer=BF16_OPTIMIZER),
    "interleaved": Case(vp=2),
    "replicas, gather": Case(
        pp=1, layers=2, ddp=GATHER, optimizer={**SHARDED, "overlap_param_gather": True, "clip_grad": 1.0}
    ),
    "tensor parallel": Case(pp=1, tp=2, layers=2),
}
FROZEN = {**{f"0B{m}": 1.0 for m in range(4)}, **{f"1B{m}": 0.75 for m in range(4)}}


def assert_same(actual: list[dict], expected: list[dict]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        for mine, other in zip(ours["steps"], theirs["steps"], strict=True):
            assert mine["losses"] == other["losses"]
            for name, value in other["after"].items():
                assert torch.equal(mine["after"][name], value), name


# --- the whole life of a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [None, 2])
def test_a_run_goes_through_all_phases_and_leaves_a_report(megatron, tmp_path, virtual):
    section = {
        "warmup_steps": 1,
        "monitoring_steps": 6,
        "progressive_steps": 2,
        "replan_interval": 2,
        "replan_threshold": 0.0,
    }
    case = Case(vp=virtual, section=section, steps=13, output_dir=str(tmp_path))
    ranks = megatron(2).run(train, case, False)
    assert [step["phase"] for step in ranks[0]["steps"]] == (
        ["warmup"] + ["monitoring_upper", "monitoring_mixed"] * 3 + ["progressive"] * 2 + ["stable"] * 4
    )
    assert [rank["status"] for rank in ranks] == [None, None]
    assert ranks[0]["plan"] == ranks[1]["plan"]
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert report["host"]["name"] == "megatron-core"
    assert report["plan"] == ranks[0]["plan"]
    assert set(report["times"]) == {action for rank in report["schedule"]["ranks"] for action in rank}
    # Only the interleaved schedule's ranks wait for their receivers elsewhere than for their own next input.
    assert bool(report["waits"]) == bool(virtual)
    stages = range(2 * (virtual or 1))
    assert set(report["measured"]["mean_afr"]) == {str(stage) for stage in stages}


def test_the_papers_monitoring_freezes_nothing_then_all_but_part_of_stage_0(megatron):
    steps = megatron(2).run(train, Case(section={"monitoring": "halves"}, steps=3), False)[0]["steps"]
    assert all(names == () for names in steps[1]["masks"].values())
    lower = steps[2]["masks"]
    assert len({len(names) for (stage, _), names in lower.items() if stage == 1}) == 1
    assert all(0 < len(names) < len(steps[0]["after"]) for (stage, _), names in lower.items() if stage == 0)


def test_a_weight_and_its_bias_are_frozen_together(megatron):
    for step in megatron(2).run(train, Case(ratios=0.5), False)[0]["steps"]:
        for names in step["masks"].values():
            modules = [name.rsplit(".", 1)[0] for name in names]
            linear = [m for m in modules if "linear" in m]
            assert all(linear.count(module) == 2 for module in linear)


# --- identity with the host alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_ratio_zero_is_bit_identical_to_the_host_alone(megatron, path):
    case = replace(PATHS[path], section={"max_freeze_ratio": 0.0}, steps=7)
    assert_same(megatron(2).run(train, case, False), megatron(2).run(train, replace(case, section=None), False))


@pytest.mark.parametrize("path", PATHS)
def test_after_detach_and_revert_training_is_bit_identical_to_the_host_alone(megatron, path):
    for detached, alone in megatron(2).run(frozen_then_left, replace(PATHS[path], ratios=0.6)):
        assert detached["losses"] == alone["losses"]
        assert detached["left"] == []
        for name, value in alone["parameters"].items():
            assert torch.equal(detached["parameters"][name], value), name


def frozen_then_left(case: Case) -> tuple[dict, dict]:
    """Freeze, detach, revert, go on; and the same steps from the same weights by a model that was never attached."""
    import megatron_patches
    import tf_adapters.megatron

    chunks, optimizer, adapter = start(case)
    for step in range(2):
        train_step(case, chunks, optimizer, step)
    adapter.detach()
    tf_adapters.megatron.revert()
    left = [patch.path for patch in megatron_patches.patches() if patch.applied]
    left += [name for chunk in chunks for name in vars(chunk) if "timely" in name]
    left += ["step"] if "step" in vars(optimizer) else []
    state = optimizer.state_dict()
    weights = [chunk.state_dict() for chunk in chunks]
    initialize(case)
    others = build_chunks(case)
    for other, saved in zip(others, weights, strict=True):
        other.load_state_dict(saved)
    fresh = build_optimizer(case, others)
    copy_optimizer(case, (chunks, optimizer), (others, fresh))
    del state
    return {**after(case, chunks, optimizer), "left": left}, after(case, others, fresh)


def copy_optimizer(case: Case, source: tuple[Any, Any], target: tuple[Any, Any]) -> None:
    """Give one optimizer the master weights and moments of the other."""
    from megatron_ranks import innermost

    from tf_adapters.megatron.optimizers import _updated, inner_of, leaves

    for theirs, ours in zip(leaves(source[1]), leaves(target[1]), strict=True):
        for group, other in zip(inner_of(theirs).param_groups, inner_of(ours).param_groups, strict=True):
            other["lr"] = group["lr"]
        for chunk, other in zip(source[0], target[0], strict=True):
            pairs = zip(innermost(chunk).parameters(), innermost(other).parameters(), strict=True)
            for old, new in pairs:
                for before, after_ in zip(_updated(theirs, old), _updated(ours, new), strict=True):
                    after_.data.copy_(before.data)
                    state = inner_of(theirs).state.get(before, {})
                    inner_of(ours).state[after_] = {k: v.clone() for k, v in state.items()}


def after(case: Case, chunks: list[Any], optimizer: Any) -> dict:
    losses = [train_step(case, chunks, optimizer, step) for step in range(3, 6)]
    for chunk in chunks:
        if case.ddp.get("overlap_param_gather"):
            chunk.start_param_sync(force_sync=True)
    return {"losses": losses, "parameters": by_name(case, chunks, values)}


@pytest.mark.parametrize("path", ["fp32", "interleaved"])
def test_evaluation_between_training_batches_changes_nothing(megatron, path):
    case = replace(PATHS[path], ratios=0.5)
    evaluated = megatron(2).run(train, case, False, True)
    without = megatron(2).run(train, case, False)
    assert_same(evaluated, without)
    alone = megatron(2).run(train, replace(case, section=None, ratios=None, steps=1), False, True)
    assert len(evaluated[1]["steps"][0]["evaluations"]) == len(alone[1]["steps"][0]["evaluations"]) == 4


# --- parameters that a whole step froze ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["fp32", "bf16", "replicas, gather"])
def test_a_parameter_frozen_all_step_does_not_move_and_keeps_its_state(megatron, path):
    single = {"0B0": 0.8, "0B1": 0.8, "0B2": 0.8, "0B3": 0.8}
    case = replace(PATHS[path], ratios=single if PATHS[path].pp == 1 else FROZEN, steps=4)
    held_at_all = 0
    for rank in megatron(2).run(train_a_little_first, case):
        for step in rank["steps"]:
            held = {key for key in step["after"] if frozen_everywhere(step, key)}
            held_at_all += len(held)
            counters = {float(s["step"]) for s in step["state_after"].values() if "step" in s}
            assert len(counters) <= 1, "Megatron saves no checkpoint of parameters that count steps differently"
            for (chunk, name), before in step["state_before"].items():
                now = step["state_after"][chunk, name]
                key = (step["stages"][chunk], name)
                same = all(torch.equal(before[k], now[k]) for k in before if k != "step")
                assert same == (key in held) or before["value"].numel() == 0, key
    assert held_at_all > 0


def train_a_little_first(case: Case) -> dict:
    """Two ordinary steps, then the plan of the case."""
    from megatron_ranks import optimizer_state, stage_of

    import tf_adapters.megatron

    initialize(case)
    chunks = build_chunks(case)
    optimizer = build_optimizer(case, chunks)
    for step in range(2):
        train_step(case, chunks, optimizer, 100 + step)
    adapter = tf_adapters.megatron.attach(chunks, optimizer, case.settings, num_microbatches=case.microbatches)
    force_plan(adapter.controller, case.ratios)
    steps = []
    for step in range(case.steps):
        masks, before = all_masks(adapter.controller), optimizer_state(chunks, optimizer)
        train_step(case, chunks, optimizer, step)
        steps.append(
            {
                "masks": masks,
                "state_before": before,
                "state_after": optimizer_state(chunks, optimizer),
                "after": by_name(case, chunks, values),
                "stages": [stage_of(case, index) for index in range(len(chunks))],
            }
        )
    adapter.detach()
    return {"steps": steps}


def frozen_everywhere(step: dict, key: tuple[int, str]) -> bool:
    return all(key[1] in names for (stage, _), names in step["masks"].items() if stage == key[0])


# --- overlapped reduction of gradients -------------------------------------------------------------------------

OVERLAP = {"overlap_grad_reduce": True}


@pytest.mark.parametrize("deferred", [False, True], ids=["in place", "deferred"])
@pytest.mark.parametrize("virtual", [None, 2])
def test_every_bucket_is_reduced_as_soon_as_its_last_gradient_is_there(megatron, virtual, deferred):
    section = {"weight_gradients": "deferred"} if deferred else {}
    pipeline = {"pp": 2, "vp": virtual} if virtual or deferred else {"pp": 1, "layers": 2}
    ratios = {f"{stage}B{m}": 0.5 for stage in range(4 if virtual else pipeline["pp"]) for m in range(4)}
    case = Case(ddp=OVERLAP, section=section, ratios=ratios, steps=4, **pipeline)
    waited = False  # on some rank: where nothing needs to wait, the host's own backward computes everything
    for steps in megatron(4 if case.pp == 2 else 2).run(reductions, case):
        late = [names for step in steps[1:] for names in step]  # in the first one DDP counts
        assert late
        assert sum("frozen" in names for names in late) > 0
        for names in late:
            if deferred:  # a frozen weight may have waiting gradients of other microbatches until the last of them
                assert "frozen" not in names[names.index("waited") :] if "waited" in names else True, names
            elif set(names) > {"frozen"}:
                assert names[-1] == "trained", names
        waited = waited or any("waited" in names for names in late)
    assert waited == deferred


@pytest.mark.parametrize("section", [None, {"weight_gradients": "deferred"}], ids=["alone", "deferred"])
def test_a_single_function_that_reduces_stays_the_hosts(megatron, section):
    """The interleaved schedule makes a list of it in the first batch, and uses this list from then on."""
    case = Case(vp=2, ddp=OVERLAP, align=True, section=section, ratios=section and 0.5, steps=3)
    for kept, called in megatron(2).run(reduced_by_one_function, case):
        assert kept
        assert called == [2] * case.steps


def reduced_by_one_function(case: Case) -> tuple[bool, list[int]]:
    """Whether the config keeps the user's function for each chunk; how often each step calls it."""
    from megatron.core.utils import get_model_config

    chunks, optimizer, adapter = start(case)
    config, chunk_of = get_model_config(chunks[0]), {p: chunk for chunk in chunks for p in chunk.parameters()}
    called = []

    def reduce(parameters: Any) -> None:
        called[-1] += 1
        chunk_of[next(iter(parameters))].start_grad_sync()

    config.grad_sync_func = reduce
    for step in range(case.steps):
        called.append(0)
        train_step(case, chunks, optimizer, step)
    if adapter is not None:
        adapter.detach()
    return config.grad_sync_func == [reduce, reduce], called


def test_a_timer_of_the_host_is_stopped_when_the_optimizer_fails(megatron):
    """Megatron's timer refuses to start while it runs."""
    assert megatron(2).run(failed_in_our_time, Case()) == [True, True]


def failed_in_our_time(case: Case) -> bool:
    from megatron.core.timers import Timers
    from megatron.core.utils import get_model_config

    chunks, optimizer, adapter = start(case)
    get_model_config(chunks[0]).timers = Timers(log_level=2, log_option="minmax")
    hold = adapter._hold

    def failing(parameters: Any) -> None:
        adapter._hold = hold
        raise KeyError("mine")

    adapter._hold = failing
    with pytest.raises(KeyError, match="mine"):
        train_step(case, chunks, optimizer, 0)
    optimizer.step()
    adapter.detach()
    return True


def test_a_parameter_frozen_in_the_first_steps_has_state_when_it_is_saved(megatron):
    for rank in megatron(2).run(train, Case(ratios=FROZEN), False):
        for step in rank["steps"]:
            assert all("exp_avg" in state for state in step["state_after"].values())
            assert len({float(state["step"]) for state in step["state_after"].values()}) == 1


def test_tied_weights_stay_equal_on_both_stages(megatron):
    first, last = megatron(2).run(train, Case(tied=True, ratios=FROZEN, steps=5), False)
    for ours, theirs in zip(first["steps"], last["steps"], strict=True):
        assert torch.equal(
            ours["after"][0, "embedding.word_embeddings.weight"], theirs["after"][1, "output_layer.weight"]
        )


# --- changes in mid-run --------------------------------------------------------------------------------------


MIXED = {
    "tensors": Case(section={}),
    "interleaved, deferred": Case(vp=2, section={"weight_gradients": "deferred"}),
    "deferred tokens": Case(section={"weight_gradients": "deferred", "granularity": "token"}),
}


def train_in_counted_time(case: Case) -> dict[str, Any]:
    with counted_time():
        return train(case)


@pytest.mark.parametrize("name", MIXED)
def test_numbers_of_microbatches_that_change_are_monitored_together_and_planned_for_apart(megatron, name):
    case = replace(MIXED[name], section={**MIXED[name].section, "monitoring_steps": 4}, numbers=(4, 6, 8), steps=12)
    ranks = megatron(2).run(train_in_counted_time, case)
    check_oracle(case, ranks)
    phases = ["warmup", *["monitoring_upper", "monitoring_mixed"] * 2, *["progressive"] * 2, *["stable"] * 5]
    for rank in ranks:
        assert (rank["status"], rank["numbers"]) == (None, [4, 6, 8])
        assert [step["phase"] for step in rank["steps"]] == phases
        assert [step["masks"] for step in rank["steps"]] == [step["masks"] for step in ranks[0]["steps"]]
        last = rank["steps"][-3:]
        assert [len(step["masks"]) for step in last] == [stages_of(case) * number for number in (4, 6, 8)]
        assert name == "deferred tokens" or all(any(step["masks"].values()) for step in last)


def stages_of(case: Case) -> int:
    return case.pp * (case.vp or 1)


@pytest.mark.parametrize("virtual", [None, 2])
def test_numbers_of_microbatches_that_change_are_the_host_to_the_bit_where_nothing_is_frozen(megatron, virtual):
    section = {"max_freeze_ratio": 0.0, "weight_gradients": "deferred"}
    case = Case(vp=virtual, section=section, numbers=(4, 6, 8), steps=9)
    ours = megatron(2).run(train, case, False)
    assert ours[0]["numbers"] == [4, 6, 8]
    assert_same(ours, megatron(2).run(train, replace(case, section=None), False))


def test_a_batch_that_has_grown_for_good_gets_its_plan_without_monitoring(megatron):
    for phases, schedule, failure in megatron(2).run(ramped_up, Case(steps=9)):
        assert failure is None
        assert phases[:5] == ["warmup", "monitoring_upper", "monitoring_mixed", "progressive", "progressive"]
        assert phases[5:] == ["stable"] * 4
        assert len(schedule[0]) == 12


def ramped_up(case: Case) -> tuple[list[str], list, str | None]:
    chunks, optimizer, adapter = start(case)
    phases = []
    for step, microbatches in enumerate([4, 4, 4, 4, 6, 6, 6, 6, 6]):
        train_step(case, chunks, optimizer, step, microbatches)
        phases.append(adapter.controller.state.phases.phase(adapter.controller.state.completed_steps).value)
    result = phases, adapter.controller.schedule.to_text(), adapter.controller.state.failure
    adapter.detach()
    return result


def test_shorter_sequences_in_mid_run_train_on_under_the_same_plan(megatron):
    for failure, phases, frozen in megatron(2).run(shortened, Case(ratios=0.5)):
        assert failure is None
        assert phases == ["stable"] * 6
        assert frozen


def shortened(case: Case) -> tuple[str | None, list[str], bool]:
    chunks, optimizer, adapter = start(case)
    phases = []
    for step, length in enumerate([CONTEXT] * 3 + [CONTEXT // 2] * 3):
        phases.append(adapter.controller.phase.value)
        zero_gradients(chunks, optimizer)
        run_batch(case, chunks, step, range(4), length=length)
        optimizer.step()
    controller = adapter.controller
    result = controller.state.failure, phases, any(controller.frozen_parameters(controller.step, s, 0) for s in (0, 1))
    adapter.detach()
    return result


def test_a_batch_that_runs_twice_counts_once(megatron):
    """Megatron's rerun machine repeats a forward-backward whose result looks wrong, before the optimizer's step."""
    for completed, executed, once, twice in megatron(2).run(rerun, Case(ratios=0.5)):
        assert completed == 6
        assert executed == 8
        for name, gradient in once.items():
            assert torch.equal(gradient, twice[name]), name


def rerun(case: Case) -> tuple[int, int, dict, dict]:
    from megatron_ranks import main_gradient

    chunks, optimizer, adapter = start(case)
    gradients = []
    for _ in range(2):
        zero_gradients(chunks, optimizer)
        run_batch(case, chunks, 0, range(4))
        gradients.append(by_name(case, chunks, main_gradient))
    executed = len(adapter.controller._executed)
    optimizer.step()
    adapter.detach()
    return adapter.controller.state.completed_steps, executed, gradients[0], gradients[1]


def test_resuming_repeats_the_masks_and_the_plan(megatron):
    for interrupted, resumed in megatron(2).run(interrupted_and_resumed, Case(ratios=0.5)):
        assert interrupted == resumed


def interrupted_and_resumed(case: Case) -> tuple[list, list]:
    chunks, optimizer, adapter = start(case)
    train_step(case, chunks, optimizer, 0)
    state = json.loads(json.dumps(adapter.controller.state_dict()))
    expected = [all_masks(adapter.controller)]
    train_step(case, chunks, optimizer, 1)
    expected.append(all_masks(adapter.controller))
    adapter.detach()
    chunks, optimizer, adapter = start(replace(case, ratios=None))
    adapter.controller.load_state_dict(state)
    masks = [all_masks(adapter.controller)]
    train_step(case, chunks, optimizer, 1)
    masks.append(all_masks(adapter.controller))
    adapter.detach()
    return expected, masks


def test_a_checkpoint_of_another_pipeline_size_monitors_again(megatron):
    for phase, notes in megatron(2).run(resumed_elsewhere, Case(ratios=0.5)):
        assert phase == "monitoring_upper"
        assert any("another pipeline" in note for note in notes)


def resumed_elsewhere(case: Case) -> tuple[str, tuple[str, ...]]:
    _, _, adapter = start(case)
    state = adapter.controller.state_dict()
    adapter.detach()
    _, _, other = start(Case(pp=1, layers=4))
    other.controller.load_state_dict(state)
    result = other.controller.phase.value, other.controller.state.notes
    other.detach()
    return result


# --- failures ------------------------------------------------------------------------------------------------


def test_a_schedule_that_the_host_does_not_run_is_shown_with_both_grids(megatron):
    with pytest.raises(RanksFailed) as failure:
        megatron(2).run(wrong_schedule, Case(steps=3))
    text = str(failure.value)
    assert text.count("ScheduleError: the ranks did not run the schedule") == 2
    assert "They ran:" in text
    assert "The schedule is:" in text


def wrong_schedule(case: Case) -> None:
    from tf_adapters.schedule.ir import PipelineSchedule

    chunks, optimizer, adapter = start(case)
    ranks = adapter.controller.schedule.to_text()
    ranks[0] = sorted(ranks[0], key=lambda text: (text[1] == "B", text))  # GPipe's order
    adapter.controller.state.schedule = PipelineSchedule.from_text(ranks)
    for step in range(case.steps):
        train_step(case, chunks, optimizer, step)


def test_a_solver_that_fails_leaves_training_going_without_freezing(megatron):
    case = Case(section={"on_error": "warn"}, steps=7)
    for failure, losses, masks in megatron(2).run(without_solver, case):
        assert "no solver today" in failure
        assert losses
        assert all(names == () for names in masks.values())


def without_solver(case: Case) -> tuple[str, list, dict]:
    from unittest import mock

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no solver today")

    with mock.patch("tf_adapters.training.plan_maker.solve", broken):
        chunks, optimizer, adapter = start(case)
        losses = [train_step(case, chunks, optimizer, step) for step in range(case.steps)]
    result = str(adapter.controller.state.failure), losses, all_masks(adapter.controller)
    adapter.detach()
    return result


def test_a_loop_that_took_its_schedule_before_attaching_is_told_so(megatron):
    first, second = megatron(2).run(taken_before, Case())
    assert first[0] == second[0] == 0
    assert sum("call get_forward_backward_func() after attach()" in line for line in first[1]) == 1


def taken_before(case: Case) -> tuple[int, list[str]]:
    from unittest import mock

    from megatron.core.pipeline_parallel import get_forward_backward_func

    import tf_adapters.megatron

    tf_adapters.megatron.revert()
    initialize(case)
    taken = get_forward_backward_func()
    chunks, optimizer, adapter = start(case)
    taking = mock.patch("megatron.core.pipeline_parallel.get_forward_backward_func", return_value=taken)
    with Lines() as lines, taking:
        for step in range(2):
            train_step(case, chunks, optimizer, step)
    adapter.detach()
    return adapter.controller.state.completed_steps, lines.seen


def test_a_wrong_setting_is_the_same_error_on_all_ranks(megatron):
    with pytest.raises(RanksFailed) as failure:
        megatron(2).run(start, Case(section={"max_freeze_ratio": 2.0}))
    assert str(failure.value).count("ConfigError: timely_freeze.max_freeze_ratio is 2.0") == 2


def test_a_model_that_only_one_rank_refuses_is_refused_on_all(megatron):
    with pytest.raises(RanksFailed) as failure:
        megatron(2).run(refused_on_one, Case())
    assert str(failure.value).count("UnsupportedError: rank 1: timely_freeze cannot run here: cuda_graph_impl") == 2


def refused_on_one(case: Case) -> None:
    from megatron.core.utils import get_model_config

    import tf_adapters.megatron

    initialize(case)
    chunks = build_chunks(case)
    optimizer = build_optimizer(case, chunks)
    if torch.distributed.get_rank() == 1:
        get_model_config(chunks[0]).cuda_graph_impl = "local"
    tf_adapters.megatron.attach(chunks, optimizer, case.settings, num_microbatches=4)
