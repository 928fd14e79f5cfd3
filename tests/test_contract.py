"""What every host must keep to, on real ranks. A host's own files test what only it has."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hosts import HOSTS, MICROBATCHES, STAGES, Tensors, setup, start

from tf_adapters.testing import RankPool, force_plan, relative_error

pytestmark = pytest.mark.distributed

LIFE = {"warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 2, "report_every": 2}
FROZEN = {**{f"0B{m}": 1.0 for m in range(MICROBATCHES)}, **{f"1B{m}": 0.75 for m in range(MICROBATCHES)}}


@pytest.fixture(scope="module", params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    """Ranks by host and size, the last used ones kept: there are two cores."""
    started: dict[tuple[str, int], RankPool] = {}

    def get(host: str, size: int = STAGES) -> RankPool:
        if (host, size) not in started:
            for pool in started.values():
                pool.close()
            started.clear()
            started[host, size] = RankPool(size, functools.partial(setup, host))
        return started[host, size]

    yield get
    for pool in started.values():
        pool.close()


# --- schedule ------------------------------------------------------------------------------------------------


def test_the_life_of_a_run_and_its_report(ranks, host, tmp_path):
    """The translated schedule is what ran (or the run had failed), and the report says all that the contract names."""
    outcomes = ranks(host).run(live, host, str(tmp_path))
    assert [failure for failure, _ in outcomes] == [None] * STAGES
    assert outcomes[0][1] == outcomes[1][1]
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert report["schedule"]["ranks"] == outcomes[0][1]
    assert set(report["plan"]) >= {"makespan_ms", "freeze_ratio", "start_ms", "duration_ms", "critical_path", "solver"}
    measured = report["measured"]
    assert measured["step_ratio"] == pytest.approx(measured["step_ms_stable"] / measured["step_ms_unfrozen"])
    assert measured["planned_ratio"] > 0
    assert set(measured["mean_afr"]) == {"0", "1"}
    assert {s["action"] for s in measured["backward_ms"]} == {f"{s}B{m}" for s in (0, 1) for m in range(MICROBATCHES)}
    assert report["config"]["max_freeze_ratio"] == 0.8
    assert report["host"]["name"]
    assert set(report["versions"]) >= {"tf_adapters", "python", "torch"}


def live(host: str, folder: str) -> tuple[str | None, list[list[str]]]:
    training = start(host, LIFE, folder)
    for number in range(9):
        training.step(number)
    state, schedule = training.controller.state, training.controller.schedule.to_text()
    training.detach()
    return state.failure, schedule


# --- gradients -----------------------------------------------------------------------------------------------


def test_the_optimizer_gets_the_mean_of_the_masked_full_gradients(ranks, host):
    check_gradients(ranks(host).run(masked, host))


def check_gradients(outcomes: list) -> None:
    assert all(masks == outcomes[0][1] for _, masks in outcomes)
    assert any(outcomes[0][1].values())
    for errors, _ in outcomes:
        assert errors
        assert max(errors.values()) <= 1e-5, errors


def masked(host: str) -> tuple[dict[str, float], dict]:
    training = start(host, {})
    force_plan(training.controller, 0.5)
    errors: dict[str, float] = {}
    everything: dict = {}
    for number in range(2):
        masks = masks_of(training)
        full = training.full_gradients(number)
        training.step(number)
        for (stage, name), actual in training.gradients().items():
            kept = [g[stage, name] * (name not in masks[stage, m]) for m, g in enumerate(full)]
            expected = torch.stack(kept).mean(0)
            errors[f"{number} {stage} {name}"] = relative_error(actual, expected)
        everything |= {(number, *key): names for key, names in masks.items()}
    training.detach()
    return errors, everything


def masks_of(training: Any) -> dict[tuple[int, int], tuple[str, ...]]:
    controller = training.controller
    return {
        (s, m): controller.frozen_parameters(controller.step, s, m) for s in range(STAGES) for m in range(MICROBATCHES)
    }


def test_a_parameter_that_a_whole_step_froze_does_not_move_and_every_other_does(ranks, host):
    held_somewhere = False
    for held, still in ranks(host).run(held_and_still, host):
        assert still == held
        held_somewhere |= bool(held)
    assert held_somewhere


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


@pytest.mark.parametrize("section", [{"max_freeze_ratio": 0.0}, {"method": "none"}], ids=["ratio 0", "method none"])
def test_without_freezing_a_run_is_bit_identical_to_the_host_alone(ranks, host, section):
    ours, alone = (ranks(host).run(losses_and_weights, host, chosen) for chosen in (section, None))
    assert_same(ours, alone)


def losses_and_weights(host: str, section: dict | None) -> tuple[list[list[float]], Tensors]:
    training = start(host, section)
    return [training.step(number) for number in range(7)], training.parameters()


def test_after_detach_a_run_is_bit_identical_to_the_host_alone(ranks, host, tmp_path):
    ours, alone = zip(*ranks(host).run(frozen_then_left, host, str(tmp_path)), strict=True)
    assert_same(ours, alone)


def frozen_then_left(host: str, folder: str) -> tuple[Any, Any]:
    training = start(host, {})
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
    for uninterrupted, resumed in ranks(host).run(interrupted, host, str(tmp_path)):
        assert uninterrupted == resumed


def interrupted(host: str, folder: str) -> tuple[list, list]:
    training = start(host, {})
    force_plan(training.controller, 0.6)
    training.step(0)
    training.save(folder)
    uninterrupted = [(masks_of(training), training.step(number)) for number in range(1, 4)]
    training.detach()
    other = start(host, {})
    other.load(folder)
    resumed = [(masks_of(other), other.step(number)) for number in range(1, 4)]
    other.detach()
    return uninterrupted, resumed


# --- replicas ------------------------------------------------------------------------------------------------


def test_replicas_draw_the_same_masks_and_average_their_gradients(ranks, host):
    check_gradients(ranks(host, 2 * STAGES).run(masked, host))


def test_replicas_stay_equal(ranks, host):
    outcomes = ranks(host, 2 * STAGES).run(weights_after_freezing, host)
    merged: dict[tuple[int, str], list[torch.Tensor]] = {}
    for weights in outcomes:
        for key, value in weights.items():
            merged.setdefault(key, []).append(value)
    for key, copies in merged.items():
        assert len(copies) == 2
        assert torch.equal(*copies), key


def weights_after_freezing(host: str) -> Tensors:
    training = start(host, {})
    force_plan(training.controller, 0.6)
    for number in range(3):
        training.step(number)
    weights = training.parameters()
    training.detach()
    return weights
