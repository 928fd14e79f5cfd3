"""What every host must keep to, on real ranks. A host's own files test what only it has."""

from __future__ import annotations

import fnmatch
import io
import json
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from clocks import counted_time
from hosts import MICROBATCHES, STAGES, Tensors, start
from logged import Lines

from tf_adapters.advice.balance import balance
from tf_adapters.measuring.batch_times import BatchTimes
from tf_adapters.measuring.phase import Phase
from tf_adapters.report.schema import Report
from tf_adapters.schedule.deferral import most_held
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.selection.sampling import sample_indices
from tf_adapters.testing import force_plan, relative_error
from tf_adapters.training import plan_maker

pytestmark = pytest.mark.distributed

LIFE = {"warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 2, "replan_interval": 2, "replan_threshold": 0.0}
# Small models of few steps: everything looks stable to these settings sooner or later, and not at once.
STABILITY = {"stability_check_interval": 1, "apf_threshold": 0.3, "autofreeze_percentile": 85.0}
METHODS = ["timely+apf", "timely+autofreeze", "apf", "autofreeze"]
each_method = pytest.mark.parametrize("method", METHODS)
FROZEN = {**{f"0B{m}": 1.0 for m in range(MICROBATCHES)}, **{f"1B{m}": 0.75 for m in range(MICROBATCHES)}}


LEVERS: dict[str, dict] = {
    "deferred": {"weight_gradients": "deferred"},
    "tokens": {"granularity": "token"},
    "deferred tokens": {"weight_gradients": "deferred", "granularity": "token"},
}
beside_training = mock.patch.object(plan_maker, "_SOLVED_AT_ONCE", 0)
"""Every plan is made by another process, as those of many actions are."""
each_lever = pytest.mark.parametrize("section", LEVERS.values(), ids=LEVERS)


# --- schedule ------------------------------------------------------------------------------------------------


def test_the_life_of_a_run_and_its_report(ranks, host, tmp_path):
    """The translated schedule is what ran (or the run had failed), and the report says all that the contract names."""
    outcomes = ranks(STAGES).run(live, host, str(tmp_path))
    assert [failure for failure, _ in outcomes] == [None] * STAGES
    assert outcomes[0][1] == outcomes[1][1]
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert report["schedule"]["ranks"] == outcomes[0][1]
    assert set(report["plan"]) >= {"makespan_ms", "freeze_ratio", "start_ms", "duration_ms", "critical_path", "solver"}
    measured = report["measured"]
    assert measured["step_ratio"] == pytest.approx(measured["step_ms_stable"] / measured["step_ms_unfrozen"])
    assert measured["planned_ratio"] > 0
    assert measured["forward_pace"] > 0
    schedule = PipelineSchedule.from_text(report["schedule"]["ranks"])
    assert set(report["communication"]) == {f"{source}->{target}" for source, target in schedule.transfers()}
    assert set(report["overhead"]) == {action for rank in report["schedule"]["ranks"] for action in rank[1:]}
    assert set(measured["mean_afr"]) == {"0", "1"}
    assert {s["action"] for s in measured["backward_ms"]} == {f"{s}B{m}" for s in (0, 1) for m in range(MICROBATCHES)}
    assert report["config"]["max_freeze_ratio"] == 0.8
    assert report["host"]["name"]
    assert report["moves_forwards"]
    memory = measured["peak_memory_bytes"]
    assert [len(memory[phase]) for phase in ("unfrozen", "stable")] == [STAGES, STAGES]
    assert memory["planned"] is None  # the host's own order
    assert all(held > 2**20 for phase in memory.values() if phase for held in phase)
    assert set(report["versions"]) >= {"tf_adapters", "python", "torch"}
    assert list(report["layers"]) == ["0", "1"]
    layers = [layer for stage in report["layers"].values() for layer in stage["layers"]]
    assert len(layers) >= 2 * STAGES
    for layer in layers:
        assert min(layer["forward_ms"], layer["backward_ms"], layer["parameters"]) > 0, layer
    assert sum(map(len, balance(Report.from_json(report)).best.layers)) == len(layers)
    batch = BatchTimes.from_json(report["batch_times"])
    assert len(batch.ranks) == STAGES
    for rank, bubble in zip(batch.ranks, batch.bubbles, strict=True):
        waits = rank.waiting_ms + rank.transfer_ms + rank.overhead_ms
        assert rank.busy_ms + waits == pytest.approx(batch.span_ms)
        assert bubble == pytest.approx(waits / batch.span_ms)
    assert {(edge.source, edge.target, edge.kind) for edge in batch.edges} == {(0, 1, "F"), (1, 0, "B")}


@pytest.mark.parametrize("limit", [None, 1e-6, 1024.0])
def test_memory_says_how_many_microbatches_a_rank_may_hold(ranks, host, tmp_path, limit):
    """On a CPU only a limit does. No order fits into one that is too low: the host trains on, and a line says it."""
    section = {**LIFE, "weight_gradients": "deferred", "extra_microbatches": "auto", "memory_limit": limit}
    section["on_error"] = "warn"
    outcomes = ranks(STAGES).run(within_memory, host, {**section, "output_dir": str(tmp_path)})
    if limit == 1e-6:
        [failure] = {failure for failure, *_ in outcomes}
        assert failure is not None
        assert "memory_limit is 1e-06, and no order of this schedule fits into so few GiB: allowed is at lea" in failure
        assert any(f"{failure}; training goes on as the host alone" in line for line in outcomes[0][3])
        return
    for failure, fitting, held, _ in outcomes:
        assert failure is None
        assert fitting == outcomes[0][1]
        if limit is None:
            assert fitting == {}
        else:
            assert set(fitting) == {0, 1}
            assert all(count > 100 for count in fitting.values())
            assert all(planned <= fitting[rank] for rank, (planned, _) in enumerate(held))
    [line] = [line for line in outcomes[0][3] if 'extra_microbatches "auto"' in line]
    assert ("set memory_limit" in line) is (limit is None)


def within_memory(host: str, section: dict[str, Any]) -> tuple[str | None, dict[int, int], list[Any], list[str]]:
    """The failure, how many microbatches fit, how many each rank holds in the plan and in the host's order, the log."""
    with Lines() as log:
        training = start(host, section)
        for number in range(8):
            training.step(number)
        state, schedule = training.controller.state, training.controller.schedule
        training.detach()
    order = (state.plan and state.plan.schedule) or schedule
    held = [(most_held(a), most_held(b)) for a, b in zip(order.ranks, schedule.ranks, strict=True)]
    return state.failure, dict(state.measurement.fitting_microbatches), held, log.seen


def test_every_parameter_learns_in_every_step_of_mixed_monitoring(ranks, host):
    """The paper's monitoring updates nothing in half of its steps."""
    for failure, phases, still in ranks(STAGES).run(monitor, host):
        assert failure is None
        assert phases == ["monitoring_upper", "monitoring_mixed"] * 2
        assert still == [set()] * 4


def monitor(host: str) -> tuple[str | None, list[str], list[set[tuple[int, str]]]]:
    """The failure; in each step of monitoring, its phase and which parameters stayed as they were."""
    training = start(host, {"warmup_steps": 1, "monitoring_steps": 4})
    training.step(0)
    phases, still = [], []
    for number in range(1, 5):
        before = training.parameters()
        phases.append(training.controller.phase.value)
        training.step(number)
        still.append({key for key, value in training.parameters().items() if torch.equal(before[key], value)})
    outcome = training.controller.state.failure, phases, still
    training.detach()
    return outcome


def test_mixed_monitoring_ends_on_all_ranks_at_once_when_it_is_precise(ranks, host):
    outcomes = ranks(STAGES).run(monitor_until_precise, host)
    assert outcomes == [(None, 11, True)] * STAGES


def monitor_until_precise(host: str) -> tuple[str | None, int, bool]:
    """The failure; the last step of monitoring; whether there is a plan. The precision is one that is reached."""
    with counted_time():
        training = start(host, {"warmup_steps": 1, "monitoring_steps": 40, "monitoring_precision": 1.0})
        for number in range(12):
            training.step(number)
        state = training.controller.state
        outcome = state.failure, state.phases.monitoring_end, state.plan is not None
        training.detach()
    return outcome


@each_method
def test_the_life_of_a_run_with_a_stability_metric(ranks, host, tmp_path, method):
    settings = {**LIFE, **STABILITY, "method": method}
    outcomes = ranks(STAGES).run(live, host, str(tmp_path), settings)
    assert [failure for failure, _ in outcomes] == [None] * STAGES
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert report["config"]["method"] == method
    assert (report["plan"] is not None) == method.startswith("timely")
    assert report["measured"]["step_ms_unfrozen"] > 0
    assert report["measured"]["step_ms_stable"] > 0


def test_a_plan_made_beside_training_is_in_force_on_all_ranks_from_one_step_on(ranks, host, tmp_path):
    outcomes = ranks(STAGES).run(plan_beside, host, str(tmp_path), timeout_s=120)
    assert [failure for failure, _, _ in outcomes] == [None] * STAGES
    starts = {start for _, start, _ in outcomes}
    assert len(starts) == 1
    assert starts.pop() > LIFE["warmup_steps"] + LIFE["monitoring_steps"]
    assert all(unfrozen for _, _, unfrozen in outcomes)


@beside_training
def plan_beside(host: str, folder: str) -> tuple[str | None, int, bool]:
    """Train until the plan has come; was nothing frozen while it was made?"""
    training = start(host, LIFE, folder)
    controller, unfrozen, number = training.controller, True, 0
    while controller.state.plan is None and not controller.state.failure:
        training.step(number)
        number += 1
        if controller.phase is Phase.PLANNING:
            unfrozen &= not any(controller.frozen_parameters(controller.step, s, 0) for s in range(STAGES))
    training.step(number)
    outcome = controller.state.failure, controller.state.phases.freezing_start, unfrozen
    training.detach()
    return outcome


def test_a_plan_whose_times_no_longer_hold_is_made_anew_on_all_ranks(ranks, host, tmp_path):
    """Beside training, which is under the old plan until then."""
    outcomes = ranks(STAGES).run(outlived, host, str(tmp_path), timeout_s=120)
    for failure, longer, plan, phase in outcomes:
        assert failure is None
        assert longer > 2
        assert plan == outcomes[0][2]
        assert phase == "stable"


@beside_training
def outlived(host: str, folder: str) -> tuple[str | None, float, dict[str, Any], str]:
    """Train with a plan for a machine that is ten times as fast, until there is another one.

    The failure; how many times as long actions are then taken to last; the plan; the phase.
    """
    training = start(host, {**LIFE, "replan_threshold": 0.1}, folder)
    controller, number = training.controller, 0
    while controller.phase is not Phase.STABLE and not controller.state.failure:
        training.step(number)
        number += 1
    state = controller.state
    tenths = {a: Bounds(bounds.lower / 10, bounds.upper / 10) for a, bounds in state.measurement.times.items()}
    state.measurement = replace(state.measurement, times=tenths)
    before, outlived = sum(bounds.upper for bounds in tenths.values()), state.plan
    while controller.state.plan is outlived and number < 500:
        training.step(number)
        number += 1
    training.step(number)
    longer = sum(bounds.upper for bounds in controller.state.measurement.times.values()) / before
    assert controller.state.plan is not None
    outcome = controller.state.failure, longer, controller.state.plan.to_json(), controller.phase.value
    training.detach()
    return outcome


def test_a_planner_that_dies_leaves_all_ranks_training(ranks, host, tmp_path):
    outcomes = ranks(STAGES).run(planner_dies, host, str(tmp_path), timeout_s=120)
    assert outcomes == [("the planner was killed by SIGKILL", ())] * STAGES


@beside_training
def planner_dies(host: str, folder: str) -> tuple[str | None, tuple[str, ...]]:
    training = start(host, {**LIFE, "on_error": "warn"}, folder)
    controller = training.controller
    for number in range(LIFE["warmup_steps"] + LIFE["monitoring_steps"] + 4):
        training.step(number)
        if controller._decisions.plan_maker._worker is not None:
            controller._decisions.plan_maker._worker._process.kill()
            controller._decisions.plan_maker._worker._process.wait()
    outcome = controller.state.failure, controller.frozen_parameters(controller.step, 0, 0)
    training.detach()
    return outcome


def live(host: str, folder: str, settings: dict = LIFE) -> tuple[str | None, list[list[str]]]:
    with only_plain_messages():
        training = start(host, settings, folder)
        for number in range(9):
            training.step(number)
        state, schedule = training.controller.state, training.controller.schedule.to_text()
        training.detach()
    return state.failure, schedule


@contextmanager
def only_plain_messages() -> Iterator[None]:
    """Ranks tell each other values of Python, arrays and records of ours: no function and no object of the host."""

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            room = module.split(".")[0]
            is_array = room == "numpy"  # rebuilt by a function of NumPy's
            assert is_array or isinstance(found, type), f"{module}.{name}"
            assert is_array or room in ("tf_adapters", "builtins", "collections"), f"{module}.{name}"
            return found

    reading = SimpleNamespace(dumps=pickle.dumps, loads=lambda data: Reader(io.BytesIO(data)).load())
    with mock.patch("tf_adapters.collectives.pickle", reading):
        yield


def test_what_is_excluded_is_never_frozen(ranks, host):
    """And a first stage of which something is excluded still has a backward where all the rest is frozen."""
    outcomes = ranks(STAGES).run(excluded, host)
    assert [failure for failure, _, _ in outcomes] == [None] * STAGES
    assert all(moved and not frozen for _, moved, frozen in outcomes)


def excluded(host: str) -> tuple[str | None, bool, bool]:
    """The failure; whether exactly what is excluded moved with all else frozen; whether any of it was in a mask."""
    probe = start(host, {})
    chosen = {probe.controller.masks.names(stage)[0] for stage in range(STAGES)}
    probe.detach()
    training = start(host, {"freeze_exclude": sorted(chosen)})
    controller = training.controller
    force_plan(controller, 1.0)
    before = training.parameters()
    training.step(0)
    moved = {key for key, value in training.parameters().items() if not torch.equal(before[key], value)}
    frozen = {(stage, name) for stage in range(STAGES) for name in controller.masks.names(stage)} & set(before)
    outcome = (
        controller.state.failure,
        bool(moved) and moved == set(before) - frozen,
        bool({n for _, n in frozen} & chosen),
    )
    training.detach()
    return outcome


def test_a_limit_holds_in_the_mean_and_the_run_and_its_report_are_as_ever(ranks, host, tmp_path):
    outcomes = ranks(STAGES).run(with_limit, host, str(tmp_path))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    failure, limited, others = outcomes[0]
    assert failure is None
    assert limited == pytest.approx(0.2, abs=0.05)
    assert others == pytest.approx(0.8, abs=0.05)
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert report["config"]["freeze_limits"] == {LIMITED_NAMES: 0.2}


LIMITED_NAMES = "*[13].*"  # of every other layer, in every host's names


def with_limit(host: str, folder: str) -> tuple[str | None, float, float]:
    """The failure, and how often what the limit is for, and everything else, is frozen under a plan of r_max."""
    training = start(host, {**LIFE, "freeze_limits": {LIMITED_NAMES: 0.2}}, folder)
    for number in range(9):
        training.step(number)
    controller = training.controller
    force_plan(controller, 0.8)
    limited, others = [], []
    for stage in range(STAGES):
        drawn = [controller.frozen_parameters(controller.step + number, stage, 0) for number in range(500)]
        frozen = Counter(name for names in drawn for name in names)
        for unit in controller.masks.units[stage]:
            group = limited if fnmatch.filter(unit.names, LIMITED_NAMES) else others
            group.append(frozen[unit.names[0]] / len(drawn))
    outcome = controller.state.failure, sum(limited) / len(limited), sum(others) / len(others)
    training.detach()
    return outcome


# --- gradients -----------------------------------------------------------------------------------------------


def test_what_the_user_freezes_after_attach_trains_no_more(ranks, host):
    """Also where masks name it in every step."""
    for named, still_trains, gradient, others in ranks(STAGES).run(frozen_by_the_user, host):
        assert named
        assert not still_trains
        assert gradient == 0.0
        assert others > 0.0


def frozen_by_the_user(host: str) -> tuple[bool, bool, float, float]:
    """Whether masks name what the user has frozen, and whether that trains; its gradient's norm, and the others'."""
    training = start(host, {})
    controller = training.controller
    training.step(0)
    force_plan(controller, 0.6)
    (stage, of_stage), *_ = controller.pipeline.parameters.items()
    everywhere = [controller.frozen_parameters(controller.step, stage, m) for m in range(MICROBATCHES)]
    name = next(name for name in sorted(set().union(*everywhere)) if not all(name in names for names in everywhere))
    of_stage[name].requires_grad_(False)
    named = False
    for number in (1, 2):
        named |= any(name in controller.mask(stage, m).names for m in range(MICROBATCHES))
        training.step(number)
    norms = {key: float(gradient.norm()) for key, gradient in training.gradients().items()}
    training.detach()
    return named, of_stage[name].requires_grad, norms.pop((stage, name)), sum(norms.values())


def test_the_optimizer_gets_the_mean_of_the_masked_full_gradients(ranks, host):
    check_gradients(ranks(STAGES).run(masked, host))


@each_method
def test_the_gradients_of_every_method_are_those_of_its_masks(ranks, host, method):
    check_gradients(ranks(STAGES).run(masked, host, {**STABILITY, "method": method}))


def test_the_gradients_under_limits_are_those_of_the_masks(ranks, host):
    check_gradients(ranks(STAGES).run(masked, host, {"freeze_limits": {LIMITED_NAMES: 0.2}}))


def test_the_gradients_are_means_over_the_microbatches_that_computed_them(ranks, host):
    check_gradients(ranks(STAGES).run(masked, host, {"gradient_scale": "computed_mean"}))


def test_the_gradients_with_layers_frozen_whole_are_those_of_the_masks(ranks, host):
    check_gradients(ranks(STAGES).run(masked, host, {"granularity": "block"}))


def check_gradients(outcomes: list) -> None:
    assert all(masks == outcomes[0][1] for _, masks in outcomes)
    assert any(outcomes[0][1].values())
    for errors, _ in outcomes:
        assert errors
        assert max(errors.values()) <= 1e-5, errors


def masked(host: str, section: dict | None = None) -> tuple[dict[str, float], dict]:
    training, first = started(host, section or {}, 0.5)
    errors: dict[str, float] = {}
    everything: dict = {}
    for number in range(first, first + 2):
        masks = masks_of(training)
        full = training.full_gradients(number)
        training.step(number)
        for (stage, name), actual in training.gradients().items():
            kept = [g[stage, name] * (name not in masks[stage, m]) for m, g in enumerate(full)]
            expected = torch.stack(kept).mean(0)
            computed = sum(name not in masks[stage, m] for m in range(len(full)))
            if training.controller.config.gradient_scale == "computed_mean":
                expected *= len(full) / max(1, computed)
            errors[f"{number} {stage} {name}"] = relative_error(actual, expected)
        everything |= {(number, *key): names for key, names in masks.items()}
    training.detach()
    return errors, everything


def started(host: str, section: dict, ratio: float) -> tuple[Any, int]:
    """A run that freezes, and the number of its next step; one with a metric has found something stable."""
    training = start(host, section)
    if training.controller.config.plans:
        force_plan(training.controller, ratio)
    number = 0
    while training.controller.config.stability_metric and not any(training.controller.state.stability.stable.values()):
        assert number < 30
        training.step(number)
        number += 1
    return training, number


def masks_of(training: Any) -> dict[tuple[int, int], tuple[str, ...]]:
    controller = training.controller
    return {
        (s, m): controller.frozen_parameters(controller.step, s, m) for s in range(STAGES) for m in range(MICROBATCHES)
    }


def test_a_parameter_that_a_whole_step_froze_does_not_move_and_every_other_does(ranks, host):
    check_held(ranks(STAGES).run(held_and_still, host))


def check_held(outcomes: list[tuple[set, set]]) -> None:
    """What was held stayed, nothing else did, and something was held on some rank."""
    for held, still in outcomes:
        assert still == held
    assert any(held for held, _ in outcomes)


def held_and_still(host: str) -> tuple[set, set]:
    training = start(host, {})
    training.step(0)
    force_plan(training.controller, FROZEN)
    masks, before = masks_of(training), training.parameters()
    training.step(1)
    after = training.parameters()
    training.detach()
    held = {(s, name) for s, name in before if all(name in masks[s, m] for m in range(MICROBATCHES))}
    return held, {key for key, value in before.items() if torch.equal(value, after[key])}


# --- identity with the host alone ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "section",
    [
        {"max_freeze_ratio": 0.0},
        {"method": "none", "max_freeze_ratio": 0.0},
        {**STABILITY, "method": "apf", "max_freeze_ratio": 0.0},
        {**LEVERS["deferred"], "max_freeze_ratio": 0.0},
        {**LEVERS["tokens"], "max_freeze_ratio": 0.0},
    ],
    ids=["ratio 0", "method none", "apf at ratio 0", "deferred at ratio 0", "tokens at ratio 0"],
)
def test_without_freezing_a_run_is_bit_identical_to_the_host_alone(ranks, host, section):
    ours, alone = (ranks(STAGES).run(losses_and_weights, host, chosen) for chosen in (section, None))
    assert_same(ours, alone)


def losses_and_weights(host: str, section: dict | None) -> tuple[list[list[float]], Tensors]:
    training = start(host, section)
    return [training.step(number) for number in range(7)], training.parameters()


def test_after_detach_a_run_is_bit_identical_to_the_host_alone(ranks, host, tmp_path):
    ours, alone = zip(*ranks(STAGES).run(frozen_then_left, host, str(tmp_path)), strict=True)
    assert_same(ours, alone)


@each_lever
def test_after_detach_nothing_of_a_lever_remains(ranks, host, tmp_path, section):
    ours, alone = zip(*ranks(STAGES).run(frozen_then_left, host, str(tmp_path), section), strict=True)
    assert_same(ours, alone)


def frozen_then_left(host: str, folder: str, section: dict | None = None) -> tuple[Any, Any]:
    training = start(host, section or {})
    force_plan(training.controller, 0.6)
    for number in range(2):
        training.step(number)
    training.save(folder)
    training.detach()
    ours = [training.step(number) for number in range(2, 5)], training.parameters()
    alone = start(host, None)
    alone.load(folder)
    return ours, ([alone.step(number) for number in range(2, 5)], alone.parameters())


def assert_same(ours: Any, alone: Any) -> None:
    for (our_losses, our_weights), (losses, weights) in zip(ours, alone, strict=True):
        assert our_losses == losses
        for key, value in weights.items():
            assert torch.equal(our_weights[key], value), key


# --- resuming ------------------------------------------------------------------------------------------------


def test_a_resumed_run_repeats_the_uninterrupted_one(ranks, host, tmp_path):
    for uninterrupted, resumed in ranks(STAGES).run(interrupted, host, str(tmp_path)):
        assert uninterrupted == resumed


@each_lever
def test_a_resumed_run_defers_and_draws_as_the_uninterrupted_one(ranks, host, tmp_path, section):
    for uninterrupted, resumed in ranks(STAGES).run(interrupted, host, str(tmp_path), section):
        if section.get("granularity") == "token":  # the first step of a process checks the taps, and uses all tokens
            assert uninterrupted[0] == resumed[0]
            assert [masks for masks, _ in uninterrupted] == [masks for masks, _ in resumed]
        else:
            assert uninterrupted == resumed


@each_method
def test_a_resumed_run_finds_the_same_stable(ranks, host, tmp_path, method):
    section = {**STABILITY, "method": method, "stability_check_interval": 2}
    for uninterrupted, resumed in ranks(STAGES).run(interrupted, host, str(tmp_path), section):
        assert uninterrupted == resumed


def interrupted(host: str, folder: str, section: dict | None = None) -> tuple[list, list]:
    training, first = started(host, section or {}, 0.6)
    training.step(first)
    training.save(folder)
    numbers = range(first + 1, first + 4)
    uninterrupted = [(masks_of(training), training.step(number)) for number in numbers]
    training.detach()
    other = start(host, section or {})
    other.load(folder)
    resumed = [(masks_of(other), other.step(number)) for number in numbers]
    other.detach()
    return uninterrupted, resumed


# --- cumulative updates --------------------------------------------------------------------------------------


def test_cumulative_updates_are_those_of_an_ordinary_copy(ranks, host):
    """Exactly, for every sampled element and for the sum over all elements."""
    everything = set()
    for found in ranks(STAGES).run(updates, host):
        assert found
        for key, (sampled, copied, total, copied_total) in found.items():
            everything.add(key[0])
            assert torch.equal(sampled, copied), key
            assert total == pytest.approx(copied_total, abs=1e-6), key
    assert everything == set(range(STAGES))


def updates(host: str) -> dict:
    """This rank's parameters: how far each moved between two checks, as it was read and by a copy of them."""
    training, copies, snapshots = start(host, {**STABILITY, "method": "timely+apf", "seed": 3}), [], []
    force_plan(training.controller, 0.5)
    for number in range(4):
        training.step(number)
        copies.append(training.parameters())
        snapshots.append(training.controller._collectives.broadcast(training.controller.state.stability.snapshot))
    training.detach()
    (then, now), (before, after) = (copies[0], copies[3]), (snapshots[0], snapshots[3])
    found, places = {}, [0, *before.sizes.cumsum().tolist()]
    for index, key in enumerate(before.keys):
        stage, name, _ = key
        if (stage, name) in then:
            sample = slice(places[index], places[index + 1])
            flat_then, flat_now = then[stage, name].flatten(), now[stage, name].flatten()
            at = torch.from_numpy(sample_indices(3, key, flat_then.numel(), int(before.sizes[index])))
            found[key] = (
                torch.from_numpy(after.samples[sample] - before.samples[sample]),
                flat_now[at] - flat_then[at],
                float(after.totals[index] - before.totals[index]),
                float((flat_now.double() - flat_then.double()).sum()),
            )
    return found


# --- replicas ------------------------------------------------------------------------------------------------


def test_a_run_that_only_measures_finds_the_slow_replica(ranks, host, tmp_path):
    outcomes = ranks(2 * STAGES).run(with_slow_rank, host, str(tmp_path))
    assert [failure for failure, *_ in outcomes] == [None] * 2 * STAGES
    rows = [line for *_, log in outcomes for line in log if "timely_freeze: goal " in line]
    names = [row.split(":")[1].strip() for row in rows]
    assert (names[0], names[-1]) == ("goal exact, placement v (ZBV on torch)", "goal paper")
    batch = Report.read(tmp_path / "timely_freeze" / "report.json").batch_times
    assert batch is not None
    assert batch.replicas == 2
    slow = {straggler.stage: straggler for straggler in batch.stragglers}[outcomes[SLOW_RANK][1]]
    assert slow.rank == SLOW_RANK
    assert slow.slowest_ms > SLOWER_S * 1e3 > slow.median_ms > 0.0
    assert slow.cost_ms > 0.0


SLOW_RANK, SLOWER_S = 2 * STAGES - 1, 0.15


def with_slow_rank(host: str, folder: str) -> tuple[str | None, int, list[str]]:
    """The failure, this rank's stage, and the last lines of its log. One rank sleeps in every forward."""
    settings = {"warmup_steps": 1, "monitoring_steps": 2, "method": "none", "max_freeze_ratio": 0.0}
    training = start(host, settings, folder)
    controller = training.controller
    (stage,) = controller.pipeline.parameters
    layer = next(iter(controller.pipeline.layers[stage].values()))
    if torch.distributed.get_rank() == SLOW_RANK:
        layer.register_forward_pre_hook(lambda *_: time.sleep(SLOWER_S))
    for number in range(4):
        training.step(number)
    with Lines() as log:
        training.detach()
    return controller.state.failure, stage, log.seen


def test_replicas_draw_the_same_masks_and_average_their_gradients(ranks, host):
    check_gradients(ranks(2 * STAGES).run(masked, host))


@pytest.mark.parametrize("method", [None, "timely+apf", "autofreeze"])
def test_replicas_stay_equal(ranks, host, method):
    section = {} if method is None else {**STABILITY, "method": method}
    outcomes = ranks(2 * STAGES).run(weights_after_freezing, host, section)
    assert all(stable == outcomes[0][1] for _, stable in outcomes)
    assert (method is not None) == bool(outcomes[0][1])
    merged: dict[tuple[int, str], list[torch.Tensor]] = {}
    for weights, _ in outcomes:
        for key, value in weights.items():
            merged.setdefault(key, []).append(value)
    for key, copies in merged.items():
        assert len(copies) == 2
        assert torch.equal(*copies), key


def weights_after_freezing(host: str, section: dict) -> tuple[Tensors, dict]:
    training, first = started(host, section, 0.6)
    for number in range(first, first + 3):
        training.step(number)
    weights, stable = training.parameters(), dict(training.controller.state.stability.stable)
    training.detach()
    return weights, stable
