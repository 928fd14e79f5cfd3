"""When a plan is made anew, and from what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from clocks import Filled
from schedules import gpipe

from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.memory import MemoryMeter
from tf_adapters.measuring.phase import Phase
from tf_adapters.planner.forecast import planned_dag, stable_durations
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.masks import StageMasks
from tf_adapters.training.pipeline import HostInfo, HostPipeline
from tf_adapters.training.plan_maker import PlanJob, RunSetup
from tf_adapters.training.replanning import Replanning, changes

SCHEDULE = gpipe(2, 2)
BOUNDS = {a: Bounds(10.0, 20.0) if a.freezable else Bounds(10.0, 10.0) for a in SCHEDULE.actions}
MEASURED = Measurement(SCHEDULE, BOUNDS, unfrozen_step_ms=200.0)
PLAN = plan(SCHEDULE, BOUNDS, 0.8)


def stable(factors: dict[int, float], share: float = 0.5, steps: int = 3) -> Filled:
    """Steps of stable freezing in which each stage's actions take ``factors`` times as long as they did."""
    found = Filled()
    for number in range(1, steps + 1):
        start = found.timer.start_step(SCHEDULE.num_microbatches)
        for action in SCHEDULE.actions:
            of_action = share if action.freezable else 0.0
            ms = BOUNDS[action].upper - of_action * (BOUNDS[action].upper - BOUNDS[action].lower)
            found.add(Phase.STABLE, action, of_action, factors.get(action.stage, 1.0) * ms)
        found.timer.stop_step(Phase.STABLE, start, number)
    return found


def watch(**settings: Any) -> Replanning:
    masks = StageMasks({stage: [FreezeUnit(("weight",), 1.0, (1,))] for stage in range(2)}, seed=0)
    pipeline = HostPipeline(HostInfo("host", "1"), SCHEDULE, units={}, parameters={})
    config, memory = TimelyFreezeConfig(goal="paper", **settings), MemoryMeter(pipeline.device)
    setup = RunSetup(config, Collectives(), pipeline, masks, timer=Filled().timer, memory=memory)
    return Replanning(setup)


def looks(watching: Replanning, found: Filled, times: int) -> list[PlanJob | None]:
    watching._run = replace(watching._run, timer=found.timer)
    return [watching.look(MEASURED, PLAN) for _ in range(times)]


def test_it_looks_at_intervals_of_stable_freezing() -> None:
    assert [step for step in range(1, 50) if watch(replan_interval=10).due(step, settled=12)] == [22, 32, 42]
    assert not any(watch(replan_threshold=0.0).due(step, settled=0) for step in range(1, 500))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9])
def test_what_masks_save_is_no_change(share: float) -> None:
    found = changes(stable({}, share).timer, BOUNDS, newest=10)
    assert set(found) == {(action.stage, action.kind) for action in SCHEDULE.actions}
    assert list(found.values()) == pytest.approx([1.0] * len(found))


def test_backwards_that_are_frozen_whole_say_nothing() -> None:
    assert {kind.value for _, kind in changes(stable({}, share=1.0).timer, BOUNDS, newest=10)} == {"F"}


def test_only_the_newest_samples_count() -> None:
    found = stable({0: 3.0})
    for action in SCHEDULE.actions:
        found.add(Phase.STABLE, action, 0.0, BOUNDS[action].upper)
    assert set(changes(found.timer, BOUNDS, newest=1).values()) == {1.0}


def test_times_that_stay_the_same_need_no_plan() -> None:
    assert looks(watch(), stable({0: 1.05, 1: 0.96}), 4) == [None] * 4


@pytest.mark.parametrize("factor", [1.3, 0.7])
def test_a_change_that_lasts_gives_bounds_that_have_it(factor: float) -> None:
    first, second = looks(watch(), stable({1: factor}), 2)
    assert first is None  # once may be a neighbour's short job
    assert second is not None
    for action, bounds in second.measurement.times.items():
        of_stage = factor if action.stage == 1 else 1.0
        assert bounds.lower == pytest.approx(of_stage * BOUNDS[action].lower)
        assert bounds.upper == pytest.approx(of_stage * BOUNDS[action].upper)
    assert second.reason == (
        "actions take other times than it was made for "
        f"(stage 0: B 1.00x F 1.00x, stage 1: B {factor:.2f}x F {factor:.2f}x)"
    )
    assert plan(SCHEDULE, second.measurement.times, 0.8).makespan_ms.unfrozen != PLAN.makespan_ms.unfrozen


def test_a_change_that_passes_is_forgotten() -> None:
    watching = watch()
    slow, usual = stable({1: 1.3}), stable({})
    assert [looks(watching, found, 1) for found in (slow, usual, slow)] == [[None]] * 3
    assert looks(watching, slow, 1) != [None]


def test_the_unfrozen_step_is_the_measured_one_and_what_the_plan_in_force_spares_of_it() -> None:
    """Twice as slow everywhere: twice what the old step saved, stage 0's backward that is frozen whole included."""
    assert PLAN.freeze_ratio[Action.parse("0B1")] == 1.0
    _, fresh = looks(watch(), stable({0: 2.0, 1: 2.0}), 2)
    assert fresh is not None
    step_ms = stable({0: 2.0, 1: 2.0}).timer.step_ms(Phase.STABLE)
    saved = PLAN.makespan_ms.unfrozen - planned_dag(MEASURED, PLAN).makespan(
        stable_durations(PLAN.duration_ms, PLAN.freeze_ratio)
    )
    assert step_ms is not None
    assert fresh.measurement.unfrozen_step_ms == pytest.approx(step_ms + 2.0 * saved)


def test_an_action_that_was_never_timed_keeps_its_bounds() -> None:
    found = Filled()
    for _ in range(3):
        found.add(Phase.STABLE, Action.parse("1F0"), 0.0, 20.0)
    _, fresh = looks(watch(), found, 2)
    assert fresh is not None
    assert fresh.measurement.times[Action.parse("0F0")] == BOUNDS[Action.parse("0F0")]
    assert fresh.measurement.times[Action.parse("1F1")] == Bounds(20.0, 20.0)
