"""What the plan promises for a whole step, on a pipeline that can be added up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedules import gpipe

from tf_adapters.measuring.measurement import Measurement
from tf_adapters.planner.forecast import forecast, planned_dag, stable_durations
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule

# F0 10, F1 10, B1 20 (10 frozen), B0 30 (20 frozen): one microbatch, so the makespan is the sum.
SCHEDULE = gpipe(2, 1)
TIMES = {"0F0": (10.0, 10.0), "1F0": (10.0, 10.0), "1B0": (10.0, 20.0), "0B0": (20.0, 30.0)}


BOUNDS = {Action.parse(text): Bounds(*pair) for text, pair in TIMES.items()}
STEP = Measurement(SCHEDULE, BOUNDS, unfrozen_step_ms=100.0)


def planned_makespan(schedule: PipelineSchedule, plan: FreezePlan) -> float:
    """A batch of stable freezing under the plan, ms."""
    return planned_dag(Measurement(schedule, {}), plan).makespan(stable_durations(plan.duration_ms, plan.freeze_ratio))


def planned(max_freeze_ratio: float, schedule: PipelineSchedule = SCHEDULE) -> FreezePlan:
    return plan(schedule, BOUNDS, max_freeze_ratio)


def test_the_rest_of_the_step_stays_as_it_was_measured() -> None:
    """70 ms of pipeline in a step of 100: what freezing takes off the pipeline, it takes off the step."""
    promised = forecast(STEP, planned(0.5))
    assert promised.unfrozen_ms == 100.0
    assert promised.planned_ms == pytest.approx(90.0)
    assert promised.ratio == pytest.approx(0.9)


def test_monitored_steps_say_what_freezing_saves() -> None:
    """Steps that take twice as long as the bounds save twice as much; of several, the median."""
    steps = [{action: scale * bounds.upper for action, bounds in BOUNDS.items()} for scale in (1.0, 2.0, 5.0)]
    long_step = replace(STEP, unfrozen_step_ms=400.0)
    assert forecast(long_step, planned(0.5), steps=steps).planned_ms == pytest.approx(380.0)


@pytest.mark.parametrize("step_ms", [0.0, 1.0, 35.0])
def test_a_step_shorter_than_its_batch_shrinks_in_the_batchs_proportion(step_ms: float) -> None:
    """Its durations may be of disturbed steps, or its ranks begin the next step early. No promise is below 0."""
    promised = forecast(replace(STEP, unfrozen_step_ms=step_ms), planned(0.5))
    assert promised.planned_ms == pytest.approx(step_ms * 60.0 / 70.0)


def test_nothing_frozen_promises_nothing() -> None:
    promised = forecast(STEP, planned(0.0))
    assert promised.planned_ms == pytest.approx(100.0)
    assert promised.ratio == pytest.approx(1.0)


def test_a_first_stage_frozen_whole_has_no_backward_at_all() -> None:
    solved = planned(1.0)
    assert solved.makespan_ms.planned == pytest.approx(50.0)
    assert planned_makespan(SCHEDULE, solved) == pytest.approx(30.0)
    assert forecast(STEP, solved).planned_ms == pytest.approx(60.0)


def test_another_stage_frozen_whole_still_passes_its_input_gradient_on() -> None:
    solved = planned(1.0)
    only_last = FreezePlan.from_json(
        {
            **solved.to_json(),
            "freeze_ratio": {"0B0": 0.0, "1B0": 1.0},
            "duration_ms": {"0F0": 10.0, "1F0": 10.0, "1B0": 10.0, "0B0": 30.0},
        }
    )
    assert planned_makespan(SCHEDULE, only_last) == pytest.approx(60.0)


def test_a_weight_gradient_half_of_stage_0_frozen_whole_vanishes_too() -> None:
    """Split backwards: torch computes all of stage 0's backward in its W."""
    split = PipelineSchedule.from_text([["0F0", "0I0", "0W0"]])
    bounds = {Action.parse(t): Bounds(*p) for t, p in {"0F0": (1, 1), "0I0": (2, 2), "0W0": (0.5, 4)}.items()}
    solved = plan(split, bounds, 1.0)
    assert planned_makespan(split, solved) == pytest.approx(3.0)


def test_a_step_that_was_not_measured_has_ratio_1() -> None:
    assert forecast(Measurement(SCHEDULE, BOUNDS), planned(0.0)).ratio == 1.0
