"""A plan made at once, or beside training: when freezing starts, and what is left when there is no plan."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import one_rank
import pytest
from clocks import Filled
from one_rank import train
from schedules import gpipe

import tf_adapters.training.plan_maker as planning
from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import PlanInputError, SolverError
from tf_adapters.measuring.memory import MemoryMeter
from tf_adapters.measuring.phase import Phase
from tf_adapters.planner.worker import BackgroundPlan
from tf_adapters.schedule.deferral import most_held
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.orders import one_forward_one_backward
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.masks import StageMasks
from tf_adapters.training.pipeline import HostInfo, HostPipeline

SCHEDULE = gpipe(1, 3)
LAST_MONITORED = 5
controller_of = partial(one_rank.controller_of, SCHEDULE)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BackgroundPlan]]:
    """The processes that planning started, stopped where they stand until a test lets them go on."""
    started: list[BackgroundPlan] = []

    class Held(BackgroundPlan):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            os.kill(self._process.pid, signal.SIGSTOP)
            started.append(self)

    monkeypatch.setattr(planning, "BackgroundPlan", Held)
    monkeypatch.setattr(planning, "_SOLVED_AT_ONCE", 0)
    yield started
    for worker in started:
        worker.close()


class LaggingClock:
    """A device that has passed only the marks of the steps before; it counts how often somebody waits for it."""

    device = "cpu"

    def __init__(self) -> None:
        self.now, self.passed, self.waits = 0.0, 0.0, 0
        self._random = random.Random(0)

    def mark(self) -> float:
        self.now += self._random.uniform(0.5, 1.5)
        return self.now

    def elapsed_ms(self, start: float, stop: float) -> float | None:
        return stop - start if stop <= self.passed else None

    def synchronize(self) -> None:
        self.waits += 1
        self.passed = self.now


def go_on(worker: BackgroundPlan) -> None:
    os.kill(worker._process.pid, signal.SIGCONT)
    worker._process.wait()


def test_a_small_plan_is_there_when_monitoring_ends(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(planning, "_SOLVED_AT_ONCE", len(SCHEDULE.actions))
    controller = controller_of(tmp_path)
    train(controller, LAST_MONITORED)
    assert controller.state.plan is not None
    assert controller.phase is Phase.PROGRESSIVE
    assert workers == []


@pytest.mark.parametrize("settings", [{"goal": "exact"}, {"max_freeze_ratio": 0.0}, {"method": "none"}])
def test_a_plan_that_freezes_nothing_is_complete_from_its_first_step(tmp_path, settings):
    controller = controller_of(tmp_path, **{"progressive_steps": 2, **settings})
    train(controller, LAST_MONITORED)
    assert controller.state.plan is not None
    assert controller.phase is Phase.STABLE
    assert controller.state.phases.ramp(LAST_MONITORED + 1) == 1.0


def test_a_plan_that_is_made_beside_training_and_freezes_nothing_is_complete_once_it_is_there(tmp_path, workers):
    controller = controller_of(tmp_path, goal="exact", progressive_steps=2)
    train(controller, LAST_MONITORED + 1)
    assert controller.phase is Phase.PLANNING
    go_on(workers[0])
    while controller.state.plan is None:
        train(controller, 1)
    assert controller.phase is Phase.STABLE


@pytest.mark.parametrize("precision", [1e-6, 1.0], ids=["never precise", "precise at once"])
def test_monitoring_waits_for_the_device_once_at_its_end(tmp_path, precision):
    """A wait empties the queue of launches: steps after it look slow, and only unfrozen ones would follow one."""
    clock = LaggingClock()
    controller = controller_of(tmp_path, clock, monitoring_steps=40, monitoring_precision=precision)
    waits = []
    while controller.state.plan is None:
        assert controller.step <= 1 + 40
        waits.append(clock.waits)
        passed = clock.now  # the device is one step behind
        train(controller, 1)
        clock.passed = max(clock.passed, passed)
    assert set(waits) == {0}
    assert clock.waits == 1
    assert len(waits) == 1 + 40 if precision < 1.0 else len(waits) < 1 + 40


def test_a_large_plan_is_made_beside_training(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(planning, "_SOLVED_AT_ONCE", len(SCHEDULE.actions) - 1)
    controller = controller_of(tmp_path)
    train(controller, LAST_MONITORED)
    assert controller.phase is Phase.PLANNING
    assert len(workers) == 1


def test_until_the_plan_is_there_nothing_is_frozen_and_then_the_ramp_begins(tmp_path, workers):
    controller = controller_of(tmp_path)
    train(controller, LAST_MONITORED + 3)
    assert controller.phase is Phase.PLANNING
    assert all(controller.mask(0, m).names == () for m in range(3))
    go_on(workers[0])
    train(controller, 1)
    assert controller.state.phases.freezing_start == LAST_MONITORED + 4
    assert [controller.state.phases.ramp(step) for step in (9, 10, 11, 12)] == [0.0, 0.5, 1.0, 1.0]
    assert controller.phase is Phase.PROGRESSIVE
    train(controller, 2)
    assert controller.phase is Phase.STABLE


def test_it_is_the_plan_that_would_have_been_made_at_once(tmp_path, workers, monkeypatch):
    controller = controller_of(tmp_path)
    train(controller, LAST_MONITORED)
    go_on(workers[0])
    train(controller, 1)
    beside = controller.state.plan
    monkeypatch.setattr(planning, "_SOLVED_AT_ONCE", len(SCHEDULE.actions))
    again = controller_of(tmp_path)
    at_once = again._decisions.plan_maker.start(planning.PlanJob(controller.state.measurement))
    assert at_once is not None
    assert beside is not None
    assert at_once.plan.freeze_ratio == pytest.approx(beside.freeze_ratio, abs=1e-12)


def planner_of(**settings: Any) -> planning.PlanMaker:
    config = TimelyFreezeConfig(**{"max_freeze_ratio": 0.8, **settings})
    units = {stage: [FreezeUnit(("weight",), 1.0, (1,))] for stage in range(2)}
    pipeline = HostPipeline(HostInfo("host", "1"), SCHEDULE, units={}, parameters={}, moves_forwards=True)
    masks, timer, memory = StageMasks(units, seed=0), Filled().timer, MemoryMeter(pipeline.device)
    return planning.PlanMaker(planning.RunSetup(config, Collectives(), pipeline, masks, timer=timer, memory=memory))


def measured(step_ms: float = 100.0) -> planning.PlanJob:
    """Two stages and 4 microbatches, 10 ms forwards, 20 ms backwards of which half is weight gradients."""
    bounds = {a: Bounds(10.0, 20.0) if a.freezable else Bounds(10.0, 10.0) for a in PIPELINE.actions}
    return planning.PlanJob(planning.Measurement(PIPELINE, bounds, unfrozen_step_ms=step_ms))


PIPELINE = gpipe(2, 4)
UNFROZEN = 10.0 * 5 + 20.0 * 5


def test_a_target_is_for_the_whole_step():
    """200 ms a step, 150 of them the pipeline: 1.1 times as fast is 18 ms less of the pipeline."""
    fastest = planner_of().start(measured(200.0))
    asked = planner_of(target_speedup=1.1).start(measured(200.0))
    assert fastest is not None
    assert asked is not None
    assert asked.plan.makespan_ms.planned == pytest.approx(UNFROZEN - 200.0 * (1 - 1 / 1.1))
    assert asked.step_ms <= 200.0 / 1.1 + 1e-6
    assert asked.plan.mean_freeze_ratio < fastest.plan.mean_freeze_ratio
    assert asked.notes == ()


def test_a_target_out_of_reach_is_said():
    asked = planner_of(target_speedup=3.0).start(measured(200.0))
    assert asked is not None
    assert len(asked.notes) == 1
    assert "66.7 ms (3.00x) is out of reach within max_freeze_ratio 0.8" in asked.notes[0]


EXACT = {"max_freeze_ratio": 0.0, "weight_gradients": "deferred"}


def exact_job(**more: Any) -> planning.PlanJob:
    """Four stages and 8 microbatches, 10 ms for each forward, input gradient and weight gradient; steps overlap."""
    schedule = one_forward_one_backward(4, 8)
    bounds = {a: Bounds(10.0, 20.0) if a.freezable else Bounds(10.0, 10.0) for a in schedule.actions}
    return planning.PlanJob(planning.Measurement(schedule, bounds, unfrozen_step_ms=330.0, steps="overlap"), **more)


def test_an_exact_plan_says_what_more_memory_would_bring():
    planned, roomy = (planner_of(**EXACT, extra_microbatches=extra).start(exact_job()) for extra in (0, 4))
    assert planned is not None
    assert roomy is not None
    assert planned.notes == (
        f"with extra_microbatches 4 a step would take {roomy.step_ms:.1f} ms, "
        "with the same bits, and ranks hold 8 microbatches at most instead of 4",
    )
    assert roomy.step_ms < planned.step_ms
    assert roomy.notes == ()


def test_what_more_memory_would_bring_is_said_once_and_only_of_exact_plans():
    again, sampled = (
        planner_of(**EXACT).start(exact_job(reason="actions take other times")),
        planner_of(max_freeze_ratio=0.2, weight_gradients="deferred").start(exact_job()),
    )
    assert again is not None
    assert sampled is not None
    assert again.notes == sampled.notes == ()


def test_a_plan_for_less_memory_says_what_it_costs():
    planned = planner_of(**EXACT, extra_microbatches=-2).start(exact_job())
    assert planned is not None
    assert planned.plan.schedule is not None
    assert max(map(most_held, planned.plan.schedule.ranks)) == 2
    assert planned.notes == (
        "extra_microbatches -2: a rank holds 2 microbatches at most, in the host's order 4; a step takes "
        f"{planned.step_ms:.1f} ms as planned, 330.0 ms in the host's order; no control steps run, since they would "
        "need the host's memory",
    )


def test_a_limit_that_no_order_keeps_ends_planning_with_the_lowest_one():
    with pytest.raises(PlanInputError, match=r"^extra_microbatches: -4: .*; allowed is at least -3$"):
        planner_of(**EXACT, extra_microbatches=-4).start(exact_job())


def test_a_failure_to_say_what_more_memory_would_bring_leaves_the_plan(monkeypatch):
    solved = planning.solve

    def solve(problem: planning.PlanProblem, limit_s: float) -> Any:
        if problem.limits.extra_microbatches:
            raise SolverError("no time left")
        return solved(problem, limit_s)

    monkeypatch.setattr(planning, "solve", solve)
    planned = planner_of(**EXACT).start(exact_job())
    assert planned is not None
    assert planned.notes == ()


def test_a_planner_that_dies_leaves_training_without_freezing(tmp_path, workers):
    controller = controller_of(tmp_path)
    train(controller, LAST_MONITORED)
    workers[0]._process.kill()
    workers[0]._process.wait()
    train(controller, 4)
    assert controller.state.failure == "the planner was killed by SIGKILL"
    assert controller.mask(0, 0).names == ()


def test_a_planner_that_dies_is_an_error_where_errors_are_asked_for(tmp_path, workers):
    controller = controller_of(tmp_path, on_error="raise")
    train(controller, LAST_MONITORED)
    workers[0]._process.kill()
    workers[0]._process.wait()
    with pytest.raises(SolverError, match="killed by SIGKILL"):
        train(controller, 1)


def test_a_checkpoint_in_between_needs_no_second_monitoring(tmp_path, workers):
    controller = controller_of(tmp_path)
    train(controller, LAST_MONITORED + 2)
    saved = json.loads(json.dumps(controller.state_dict()))
    resumed = controller_of(tmp_path)
    resumed.load_state_dict(saved)
    assert resumed.phase is Phase.PLANNING
    assert resumed.state.measurement == controller.state.measurement
    go_on(workers[1])
    train(resumed, 1)
    assert resumed.state.plan is not None
    assert resumed.state.phases.freezing_start == LAST_MONITORED + 3


def test_a_plan_is_looked_for_ever_more_rarely_and_after_a_restart_often_again(tmp_path, workers, monkeypatch):
    looked: list[int] = []
    monkeypatch.setattr(BackgroundPlan, "poll", lambda self: looked.append(controller.step - 1))
    controller = controller_of(tmp_path)
    train(controller, LAST_MONITORED + 40)
    waited = [step - LAST_MONITORED for step in looked]
    assert waited == [*range(1, 16), *range(16, 24, 2), *range(24, 32, 3), *range(32, 41, 4)]
    saved = controller.state_dict()
    looked.clear()
    controller = controller_of(tmp_path)
    controller.load_state_dict(saved)
    train(controller, 3)
    assert looked == [LAST_MONITORED + 41, LAST_MONITORED + 42, LAST_MONITORED + 43]


def test_another_schedule_gives_the_plan_up(tmp_path, workers):
    controller = controller_of(tmp_path)
    train(controller, LAST_MONITORED)
    controller.reschedule(gpipe(1, 3))
    assert workers[0]._process.poll() is not None
    assert controller.phase is Phase.MONITORING_UPPER


def test_the_end_of_training_ends_the_planner(tmp_path, workers):
    controller = controller_of(tmp_path)
    train(controller, LAST_MONITORED)
    controller.close()
    assert workers[0]._process.poll() is not None
