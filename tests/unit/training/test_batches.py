"""Batches whose number of microbatches changes: a plan for each number, from times that were measured once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import FakeClock
from problems import plan_problem
from schedules import gpipe, one_f_one_b

import tf_adapters.training.plan_maker as planning
from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import SolverError
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.phase import Phase
from tf_adapters.report import Report
from tf_adapters.report.observer import RunReporter
from tf_adapters.report.page import as_text
from tf_adapters.report.terminal import page
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.testing.plans import tensor_units
from tf_adapters.training.batches import MOST_NUMBERS, BatchPlan, BatchPlans, carried_over, same_pipeline
from tf_adapters.training.controller import Controller
from tf_adapters.training.pipeline import HostInfo, HostPipeline

LAST_MONITORED = 9
LENGTHS = {Kind.FORWARD: 10.0, Kind.BACKWARD: 20.0}


def controller_of(folder: Path, microbatches: int = 4, **settings: Any) -> Controller:
    """One rank with two stages, on a clock that only the actions move on."""
    named = {s: {f"{s}.{name}.w": torch.nn.Parameter(torch.ones(8, 8)) for name in "abcd"} for s in (0, 1)}
    lengths = {"goal": "paper", "warmup_steps": 1, "monitoring_steps": 8, "progressive_steps": 2}
    config = TimelyFreezeConfig(**{**lengths, "output_dir": str(folder), "replan_threshold": 0.0, **settings})
    units = {stage: tensor_units(parameters) for stage, parameters in named.items()}
    pipeline = HostPipeline(HostInfo("test", "0"), order(microbatches), units, named, clock=FakeClock())
    return Controller(config, pipeline, Collectives(), RunReporter(Collectives()))


def order(microbatches: int) -> PipelineSchedule:
    """All forwards of both stages, then all backwards."""
    ways = ((Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 1), (Kind.BACKWARD, 0))
    return PipelineSchedule((tuple(Action(stage, kind, m) for kind, stage in ways for m in range(microbatches)),))


def train(controller: Controller, numbers: Iterable[int]) -> list[dict[Any, tuple[str, ...]]]:
    """A step for each number of microbatches; the masks that each ran with."""
    ran = []
    clock: Any = controller.timer._clock
    for number in numbers:
        if number != controller.state.microbatches:
            controller.reschedule(order(number))
        controller.begin_step()
        masks = {}
        for action in controller.execution.ranks[0]:
            mask = masks[action.stage, action.microbatch] = controller.mask(action.stage, action.microbatch)
            with controller.running(action):
                clock.now += LENGTHS[action.kind] * (1.0 - (0.5 * mask.share if action.freezable else 0.0))
        clock.now += 5.0
        controller.end_step()
        ran.append({place: mask.names for place, mask in masks.items()})
    return ran


def alternating(steps: int) -> list[int]:
    return list(islice(cycle((4, 6, 8)), steps))


# --- known times for another number -----------------------------------------------------------------------------


def measured(microbatches: int) -> Measurement:
    schedule = one_f_one_b(2, microbatches)
    bounds = {
        a: Bounds(8.0 + a.stage + a.microbatch, 20.0 + a.microbatch) if a.freezable else Bounds(10.0, 10.0)
        for a in schedule.actions
    }
    gaps = dict.fromkeys(schedule.transfers(), 0.5), dict.fromkeys(schedule.actions, 0.25)
    batch = Measurement(schedule, bounds, *gaps)
    return batch.of_step(batch.span_ms + 7.0)


@pytest.mark.parametrize("number", [2, 3, 7])
def test_known_times_carry_over_and_further_microbatches_take_their_stages_median(number: int) -> None:
    known, schedule = measured(5), one_f_one_b(2, number)
    other = carried_over(known, schedule)
    assert set(other.times) == set(schedule.actions)
    for action, bounds in other.times.items():
        twin = Action(action.stage, action.kind, min(action.microbatch, 2 if action.microbatch > 4 else 4))
        assert bounds == known.times[twin]  # of 0 to 4 the median is 2's
    assert set(other.communication) == set(schedule.transfers())
    assert {*other.communication.values(), *other.overhead.values()} == {0.5, 0.25}
    assert other.unfrozen_step_ms == pytest.approx(other.span_ms + 7.0)
    assert other.other_ms == pytest.approx(7.0)
    assert carried_over(known, known.schedule) is known


def test_a_target_grows_with_the_batch() -> None:
    known = measured(4)
    other = carried_over(known, one_f_one_b(2, 8))
    faster = TimelyFreezeConfig(target_speedup=1.25)
    assert faster.target_ms(other.unfrozen_step_ms) == pytest.approx(other.unfrozen_step_ms / 1.25)


def test_a_pipeline_is_the_same_where_its_ranks_run_the_same_stages() -> None:
    assert same_pipeline(one_f_one_b(2, 4), one_f_one_b(2, 6))
    assert not same_pipeline(one_f_one_b(2, 4), one_f_one_b(3, 4))
    assert not same_pipeline(one_f_one_b(2, 4), gpipe(1, 4))


# --- plans by number --------------------------------------------------------------------------------------------


def test_the_plan_that_was_used_longest_ago_is_given_up() -> None:
    plans = BatchPlans()
    for number in range(1, MOST_NUMBERS + 1):
        assert plans.has_room(number, step=number, interval=100)
        plans.put(batch_plan(number, at=number))
    for _ in range(3):
        plans.used(1)
    newest = MOST_NUMBERS + 1
    assert not plans.has_room(newest, step=20, interval=100)  # its place would be taken again at once
    assert plans.has_room(newest, step=MOST_NUMBERS + 100, interval=100)
    plans.put(batch_plan(newest, at=MOST_NUMBERS + 100))
    assert plans.of.get(2) is None
    assert plans.most_used is plans.of.get(1)
    assert len(plans.of) == MOST_NUMBERS
    plans.put(batch_plan(1, at=300))
    assert plans.of[1].steps == 3  # made anew, it is still the same number's


def batch_plan(number: int, at: int) -> BatchPlan:
    schedule = gpipe(1, number)
    times = {a: Bounds(1.0, 2.0) if a.freezable else Bounds(1.0, 1.0) for a in schedule.actions}
    plan = planning.solve(plan_problem(schedule, times, 0.5))
    return BatchPlan(schedule, plan, 2.0, 1.0, planned_at=at)


# --- a run ------------------------------------------------------------------------------------------------------


def test_mixed_numbers_are_monitored_together_and_each_has_a_plan_after_its_first_step(tmp_path: Path) -> None:
    controller = controller_of(tmp_path)
    train(controller, alternating(LAST_MONITORED))
    assert controller.phase is Phase.PROGRESSIVE
    assert sorted(controller.state.plans.of) == [6, 8]  # the one that most steps had, and the one that ran last
    train(controller, [6, 4, 8, 6, 4, 8])
    assert controller.phase is Phase.STABLE
    state = controller.state
    assert sorted(state.plans.of) == [4, 6, 8]
    for number, batch in state.plans.of.items():
        assert set(batch.plan.freeze_ratio) == {a for a in order(number).actions if a.freezable}
        # Two stages on one rank: all that freezing saves counts, 0.8 of half of every backward.
        whole = number * 2 * 30.0
        assert batch.unfrozen_step_ms == pytest.approx(whole + 5.0, rel=1e-3)
        assert batch.plan.makespan_ms.planned == pytest.approx(whole - 0.8 * number * 2 * 10.0, rel=1e-2)
    assert not any("began again" in note for note in state.notes)


def test_a_number_that_has_a_plan_uses_it_at_once(tmp_path: Path) -> None:
    controller = controller_of(tmp_path)
    train(controller, [4] * (LAST_MONITORED + 2))
    (first,) = train(controller, [6])
    assert not any(first.values())  # known now
    again = train(controller, [4, 6, 4, 6])
    assert all(any(masks.values()) for masks in again)
    assert len(again[1]) == 2 * 6


def test_masks_are_those_of_the_step_and_the_number_and_a_restart_repeats_them(tmp_path: Path) -> None:
    def at(controller: Controller, number: int, step: int) -> list[Any]:
        if number != controller.state.microbatches:
            controller.reschedule(order(number))
        return [controller.frozen_parameters(step, s, m) for s in (0, 1) for m in range(number)]

    controller = controller_of(tmp_path)
    train(controller, [*alternating(LAST_MONITORED), 6, 4, 8])
    saved = json.loads(json.dumps(controller.state_dict()))
    for number in (4, 6, 8, 10):
        resumed = controller_of(tmp_path, microbatches=number)
        resumed.load_state_dict(saved)
        assert resumed.state == controller.state
        assert resumed.phase is Phase.STABLE
        for other in (8, 4, 6):
            assert at(resumed, other, 100) == at(controller, other, 100) != at(controller, other, 101)
    on, off = controller_of(tmp_path), controller_of(tmp_path, method="none")
    off.load_state_dict({**saved, "fingerprint": "another"})
    assert off.state.plan is None
    on.load_state_dict(saved)
    train(controller, [10])
    train(on, [10])
    assert at(on, 10, 100) == at(controller, 10, 100)


def test_a_larger_number_that_a_checkpoint_knows_nothing_of_is_planned_for_without_monitoring(tmp_path: Path) -> None:
    controller = controller_of(tmp_path)
    train(controller, [4] * (LAST_MONITORED + 3))
    resumed = controller_of(tmp_path, microbatches=6)
    resumed.load_state_dict(controller.state_dict())
    first, second = train(resumed, [6, 6])
    assert not any(first.values())
    assert any(second.values())
    assert resumed.state.measurement.times == controller.state.measurement.times


def test_with_more_numbers_than_have_room_plans_are_exchanged_now_and_then(tmp_path: Path) -> None:
    controller = controller_of(tmp_path, replan_interval=50)
    train(controller, [1] * LAST_MONITORED)
    made: list[int] = []
    put, BatchPlans.put = BatchPlans.put, lambda self, batch: made.append(batch.planned_at) or put(self, batch)
    try:
        train(controller, [*range(2, 22)] * 10)
    finally:
        BatchPlans.put = put
    assert len(controller.state.plans.of) == MOST_NUMBERS
    full = made[MOST_NUMBERS - 2 :]
    assert len(full) >= 3
    assert all(later - sooner >= 50 for sooner, later in pairwise(full))


def test_other_numbers_train_as_they_are_while_one_is_planned_beside_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_SOLVED_AT_ONCE", 0)
    controller = controller_of(tmp_path)
    train(controller, [4] * LAST_MONITORED)
    assert controller.phase is Phase.PLANNING
    while not controller.state.plans:
        assert not any(train(controller, [6])[0].values())
    assert list(controller.state.plans.of) == [4]
    for _ in range(10_000):
        if 6 in controller.state.plans.of:
            break
        train(controller, [6, 8])
    for number in (6, 4):  # how many steps the plan took is open, so one of two may be a control step
        steps = train(controller, [number, number])
        assert any(any(masks.values()) for masks in steps)


def test_a_number_that_no_plan_can_be_made_for_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = controller_of(tmp_path, on_error="raise")
    train(controller, [4] * (LAST_MONITORED + 3))

    def broken(*_: Any, **__: Any) -> None:
        raise SolverError("the solver broke")

    monkeypatch.setattr(planning, "solve", broken)
    train(controller, [6, 6])
    monkeypatch.undo()
    steps = train(controller, [6, 4])
    assert [any(masks.values()) for masks in steps] == [False, True]
    assert controller.state.failure is None


def test_where_times_change_every_number_is_planned_for_anew(tmp_path: Path) -> None:
    controller = controller_of(tmp_path, replan_threshold=0.1, replan_interval=6)
    train(controller, [*alternating(LAST_MONITORED), *alternating(9)])
    state = controller.state
    before = dict(state.plans.of)
    halved = {a: Bounds(b.lower / 2, b.upper / 2) for a, b in state.measurement.times.items()}
    state.measurement = replace(state.measurement, times=halved)
    train(controller, alternating(30))
    assert sorted(state.plans.of) == [4, 6, 8]
    for number, batch in state.plans.of.items():
        assert batch.planned_at > before[number].planned_at
        whole = {a: b.upper for a, b in state.measured_for(order(number)).times.items()}
        assert sum(whole.values()) == pytest.approx(number * 2 * 30.0, rel=0.05)
    assert state.phases.monitoring_end == LAST_MONITORED


def test_without_plans_nothing_begins_again(tmp_path: Path) -> None:
    controller = controller_of(tmp_path, method="apf", stability_check_interval=2)
    phases = controller.state.phases
    train(controller, alternating(9))
    assert controller.state.phases == phases
    assert controller.state.notes == ("method apf freezes what is stable: nothing is planned",)


def test_the_report_is_of_the_number_that_most_steps_had_and_lists_all(tmp_path: Path) -> None:
    controller = controller_of(tmp_path)
    train(controller, [*alternating(LAST_MONITORED), *[6, 4, 6, 8] * 6])
    controller.close()
    report = Report.read(controller.report_path)
    assert report.schedule == order(6)
    assert list(report.batches) == ["4", "6", "8"]
    assert report.batches["6"].steps > report.batches["4"].steps
    assert report.plan is not None
    assert set(report.times) == {str(action) for action in order(6).actions}
    assert report.measured.step_ms_unfrozen == pytest.approx(6 * 2 * 30.0 + 5.0, rel=1e-3)
    assert report.measured.step_ms_stable == pytest.approx(report.measured.planned_step_ms, rel=0.05)
    assert "planned: 4 microbatches" in as_text(page(report))
