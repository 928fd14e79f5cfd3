"""Stability checks: when they are due, what they read and decide, and how they survive a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from schedules import one_f_one_b

from tf_adapters.collectives import Collectives, RemoteError
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.phase import Phase
from tf_adapters.report.observer import RunReporter
from tf_adapters.schedule.ir import Action
from tf_adapters.selection.sampling import ParameterPiece
from tf_adapters.selection.stability import StabilityChecks, StabilityState
from tf_adapters.testing import force_plan
from tf_adapters.testing.plans import tensor_units
from tf_adapters.training import decisions
from tf_adapters.training.controller import Controller
from tf_adapters.training.pipeline import HostInfo, HostPipeline

MICROBATCHES = 3
SETTINGS: dict[str, Any] = {
    "goal": "paper",
    "warmup_steps": 2,
    "monitoring_steps": 4,
    "progressive_steps": 2,
    "stability_check_interval": 3,
    "on_error": "raise",
}


def weights(seed: int = 0) -> dict[int, dict[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        stage: {f"{block}.w": torch.nn.Parameter(torch.randn(40, 50, generator=generator)) for block in range(4)}
        for stage in (0, 1)
    }


def controller_of(parameters: Any, output_dir: Any, **settings: Any) -> Controller:
    config = TimelyFreezeConfig(**{**SETTINGS, "output_dir": str(output_dir), **settings})
    units = {stage: tensor_units(of_stage) for stage, of_stage in parameters.items()}
    pipeline = HostPipeline(HostInfo("test", "0"), one_f_one_b(2, MICROBATCHES), units, parameters)
    return Controller(config, pipeline, Collectives(), RunReporter(Collectives()))


def ratio_of(controller: Controller, action: Action) -> float:
    """What the current step is to freeze of an action."""
    return controller._ratios.ratio(controller.state, controller.step, action)


def train(controller: Controller, parameters: Any, step: int) -> None:
    """One step: the first blocks oscillate, the last ones move steadily; what is held stays."""
    controller.begin_step()
    executed = [action for actions in controller.schedule.ranks for action in actions]
    for action in executed:
        with controller.running(action):
            pass
    held = {id(p) for p in controller.held_parameters()}
    with torch.no_grad():
        for of_stage in parameters.values():
            for block, parameter in enumerate(of_stage.values()):
                if id(parameter) not in held:
                    sign = 1.0 if block > 1 or step % 2 else -1.0
                    parameter.add_(sign * 0.1 * (1 + block))
    controller.end_step()


@pytest.fixture(autouse=True)
def _one_process_is_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests run both stages in one process, which no real rank does."""
    monkeypatch.setattr(decisions, "verify_schedule", lambda *_: None)


OSCILLATING = {0: frozenset({0, 1}), 1: frozenset({0, 1})}
APF = {"apf_threshold": 0.5, "stability_check_interval": 1}


# --- the methods alone ---------------------------------------------------------------------------------------


def test_apf_alone_freezes_after_the_warmup_without_a_plan(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    parameters = weights()
    controller = controller_of(parameters, tmp_path, method="apf", **APF)
    phases, stable = [], []
    for step in range(1, 9):
        phases.append(controller.phase)
        train(controller, parameters, step)
        stable.append(dict(controller.state.stability.stable))
    assert controller.state.plan is None
    assert "apf finds stable, by work, stage 0: 0.50, stage 1: 0.50; scores from 0" in caplog.text
    assert phases[:3] == [Phase.WARMUP, Phase.WARMUP, Phase.MONITORING_UPPER]
    assert Phase.STABLE in phases
    assert stable[1] == {}  # only read: nothing to compare with
    assert OSCILLATING in stable
    controller.close()
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert report["plan"] is None
    assert report["note"] == ["method apf freezes what is stable: nothing is planned"]
    assert report["measured"]["step_ms_unfrozen"] > 0
    assert report["measured"]["step_ms_stable"] > 0


def test_alone_the_same_is_frozen_in_every_microbatch_and_held(tmp_path: Any) -> None:
    parameters = weights()
    controller = controller_of(parameters, tmp_path, method="apf", **APF)
    step = 0
    while controller.state.stability.stable != OSCILLATING:
        step += 1
        train(controller, parameters, step)
    controller.begin_step()
    masks = {controller.frozen_parameters(controller.step, 0, m) for m in range(MICROBATCHES)}
    assert masks == {("0.w", "1.w")}
    assert ratio_of(controller, controller.schedule.ranks[0][-1]) == 0.5
    assert {id(p) for p in controller.held_parameters()} == {
        id(of_stage[name]) for of_stage in parameters.values() for name in ("0.w", "1.w")
    }


def test_alone_a_stable_parameter_with_a_limit_is_frozen_with_that_chance(tmp_path: Any) -> None:
    parameters = weights()
    controller = controller_of(parameters, tmp_path, method="apf", freeze_limits={"0.w": 0.25}, **APF)
    step = 0
    while controller.state.stability.stable != OSCILLATING:
        step += 1
        train(controller, parameters, step)
    action = controller.schedule.ranks[0][-1]
    assert ratio_of(controller, action) == 1.25 / 3.25
    masks = [controller.frozen_parameters(controller.step, stage, m) for stage in (0, 1) for m in range(MICROBATCHES)]
    drawn = [controller.frozen_parameters(controller.step + later, 0, 0) for later in range(400)]
    assert set(masks) | set(drawn) == {("0.w", "1.w"), ("1.w",)}
    assert sum("0.w" in names for names in drawn) / len(drawn) == pytest.approx(0.25, abs=0.1)


def test_what_is_excluded_from_freezing_is_not_judged(tmp_path: Any) -> None:
    parameters = weights()
    controller = controller_of(parameters, tmp_path, method="apf", freeze_exclude=["0.w"], **APF)
    frozen = set()
    for step in range(1, 9):
        frozen |= {controller.frozen_parameters(controller.step, stage, 0) for stage in (0, 1)}
        train(controller, parameters, step)
    assert frozen == {(), ("1.w",)}
    snapshot = controller.state.stability.snapshot
    assert snapshot is not None
    assert {name for _, name, _ in snapshot.keys} == {"1.w", "2.w", "3.w"}


def test_autofreeze_alone_freezes_a_growing_prefix(tmp_path: Any) -> None:
    parameters = weights()
    controller = controller_of(parameters, tmp_path, method="autofreeze", stability_check_interval=1)
    found = []
    for step in range(1, 12):
        train(controller, parameters, step)
        stable = controller.state.stability.stable
        found.append(tuple(len(stable.get(stage, ())) for stage in (0, 1)))
    assert found == sorted(found)
    assert 0 < sum(found[-1]) <= 6  # 80% of eight layers
    assert found[-1][1] == 0 or found[-1][0] == 4


@pytest.mark.parametrize("method", ["apf", "autofreeze", "timely+apf", "timely+autofreeze"])
def test_at_ratio_0_nothing_is_read_or_frozen(method: str, tmp_path: Any) -> None:
    parameters = weights()
    controller = controller_of(parameters, tmp_path, method=method, max_freeze_ratio=0.0, **APF)
    for step in range(1, 12):
        train(controller, parameters, step)
    assert controller.state.stability == StabilityState()
    assert controller.frozen_parameters(controller.step, 0, 0) == ()


# --- hybrids -------------------------------------------------------------------------------------------------


def test_a_hybrid_takes_the_budget_from_the_plan_and_the_choice_from_the_metric(tmp_path: Any) -> None:
    parameters = weights()
    controller = controller_of(parameters, tmp_path, method="timely+apf", **APF)
    force_plan(controller, {f"{s}B{m}": ratio for s in (0, 1) for m, ratio in enumerate((0.25, 0.5, 0.75))})
    for step in range(controller.step, controller.step + 6):
        train(controller, parameters, step)
    assert controller.state.stability.stable == OSCILLATING
    thinned, exact, filled = (set(controller.frozen_parameters(controller.step, 0, m)) for m in range(MICROBATCHES))
    assert len(thinned) == 1
    assert thinned < {"0.w", "1.w"} == exact
    assert len(filled) == 3
    assert filled > exact


def test_monitoring_is_of_uniform_masks_and_the_first_check_after_it(tmp_path: Any) -> None:
    parameters = weights()
    controller = controller_of(parameters, tmp_path, method="timely+apf", monitoring_steps=4)
    plain = controller_of(weights(), tmp_path, method="timely")
    for step in range(1, 13):
        for stage in (0, 1):
            if controller.phase.monitors:
                masks = [c.frozen_parameters(step, stage, 1) for c in (controller, plain)]
                assert masks[0] == masks[1]
        train(controller, parameters, step)
        assert (controller.state.stability.snapshot is not None) == (step >= 6)  # T_m
        assert controller.state.stability.checks == max(0, (step - 6) // 3)


# --- reading -------------------------------------------------------------------------------------------------


def checks_of(held: Any, collectives: Any, **settings: Any) -> StabilityChecks:
    units = {stage: tensor_units(of_stage) for stage, of_stage in weights().items()}
    return StabilityChecks(TimelyFreezeConfig(**{"method": "apf", **settings}), units, [0], held, collectives)


def test_a_failure_while_reading_is_the_same_on_all_ranks() -> None:
    def fails(stage: int, name: str) -> Any:
        raise RuntimeError("no such shard")

    with pytest.raises(RemoteError, match="no such shard"):
        checks_of(fails, Collectives()).run(StabilityState(), 3, 0)


@pytest.mark.parametrize(("step", "due"), [(9, False), (10, True), (11, False), (13, True), (14, False)])
def test_checks_are_due_every_interval_from_where_freezing_starts(step: int, due: bool) -> None:
    checks = checks_of(None, Collectives(), stability_check_interval=3)
    assert checks.due(step, 10) is due
    assert not checks_of(None, Collectives(), method="timely", stability_check_interval=3).due(step, 10)


def test_after_another_sharding_the_model_is_only_read_and_what_is_stable_stays() -> None:
    parameters = weights()
    part: tuple[int, ...] = ()
    checks = checks_of(lambda stage, name: (ParameterPiece(parameters[stage][name], part),), Collectives())
    state = checks.run(StabilityState(), 0, 0)
    state = replace(state, checks=3, stable={0: frozenset({1})}, memory={"trend": np.ones(8)})
    part = (5,)
    later = checks.run(state, 50, 0)
    assert (later.checks, later.stable, list(later.memory)) == (3, {0: frozenset({1})}, ["trend"])
    assert later.snapshot is not None
    assert later.snapshot.keys[0] == (0, "0.w", (5,))


# --- through a checkpoint ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["apf", "autofreeze", "timely+apf", "timely+autofreeze"])
def test_a_restart_repeats_the_masks(method: str, tmp_path: Any) -> None:
    settings = {**APF, "method": method, "stability_check_interval": 2, "autofreeze_percentile": 60}
    parameters = weights()
    controller = controller_of(parameters, tmp_path, **settings)
    if controller.config.plans:
        force_plan(controller, 0.6)
    start = controller.step
    for step in range(start, start + 7):
        train(controller, parameters, step)
    saved = json.loads(json.dumps(controller.state_dict()))
    copies = {s: {n: torch.nn.Parameter(p.detach().clone()) for n, p in of.items()} for s, of in parameters.items()}
    other = controller_of(copies, tmp_path, **settings)
    other.load_state_dict(saved)
    assert other.state.stability == controller.state.stability
    assert controller.state.stability.checks > 0
    frozen = False
    for step in range(start + 7, start + 15):
        masks = [
            {(s, m): c.frozen_parameters(c.step, s, m) for s in (0, 1) for m in range(MICROBATCHES)}
            for c in (controller, other)
        ]
        assert masks[0] == masks[1]
        frozen |= any(masks[0].values())
        train(controller, parameters, step)
        train(other, copies, step)
    assert frozen
    assert other.state_dict() == controller.state_dict()


def test_a_checkpoint_of_before_there_were_checks_is_read(tmp_path: Any) -> None:
    controller = controller_of(weights(), tmp_path, method="timely")
    force_plan(controller, 0.5)
    saved = controller.state_dict()
    del saved["stability"], saved["checksum"]
    controller.load_state_dict(saved)
    assert controller.state.stability == StabilityState()
    assert controller.state.plan is not None


def test_another_schedule_keeps_what_is_stable(tmp_path: Any) -> None:
    parameters = weights()
    controller = controller_of(parameters, tmp_path, method="apf", **APF)
    for step in range(1, 8):
        train(controller, parameters, step)
    stable = controller.state.stability
    assert stable.checks
    controller.reschedule(one_f_one_b(2, 5))
    assert controller.state.stability is stable
    assert controller.phase in (Phase.STABLE, Phase.MONITORING_UPPER)
