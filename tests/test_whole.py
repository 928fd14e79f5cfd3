"""Backwards of the first stage that the plan freezes whole."""

from __future__ import annotations

from typing import Any

import pytest
from schedules import gpipe, one_f_one_b, split_one_f_one_b

from tf_adapters.errors import PlanInputError
from tf_adapters.planner.forecast import planned_makespan
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.solve import plan, plan_from_json
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

FORWARD, BACKWARD = 17.0, 35.0
FIRST = [Action(0, Kind.BACKWARD, m) for m in range(8)]


def times(schedule: PipelineSchedule) -> dict[Action, Bounds]:
    """Half of every backward is weight gradients."""
    return {
        action: Bounds(BACKWARD / 2, BACKWARD) if action.freezable else Bounds(FORWARD, FORWARD)
        for action in schedule.actions
    }


def planned(schedule: PipelineSchedule, **settings: Any) -> FreezePlan:
    return plan(schedule, times(schedule), 0.8, **settings)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_the_batch_ends_no_later_and_freezes_no_more(make: Any, stages: int) -> None:
    schedule = make(stages, 8)
    partial, whole = planned(schedule), planned(schedule, first_stage_vanishes=True)
    reached = planned_makespan(schedule, partial)  # a line's plan that freezes a backward whole gets that for nothing
    assert whole.makespan_ms.planned <= reached * 1.001
    assert whole.mean_freeze_ratio <= partial.mean_freeze_ratio + 0.01


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_less_is_frozen_for_an_end_that_partial_masks_reach_too(make: Any) -> None:
    schedule = make(2, 8)
    target = 1.1 * planned_makespan(schedule, planned(schedule))
    partial = planned(schedule, target_makespan_ms=target)
    whole = planned(schedule, target_makespan_ms=target, first_stage_vanishes=True)
    assert whole.makespan_ms.planned == pytest.approx(target)
    assert whole.mean_freeze_ratio < partial.mean_freeze_ratio - 0.1


@pytest.mark.parametrize("stages", [2, 4])
def test_the_plan_counts_on_the_first_stages_last_backward_only(stages: int) -> None:
    schedule = gpipe(stages, 8)
    target = 1.1 * planned(schedule).makespan_ms.planned
    whole = planned(schedule, target_makespan_ms=target, first_stage_vanishes=True)
    assert [action for action in FIRST if whole.duration_ms[action] == 0.0] == FIRST[-1:]
    assert whole.freeze_ratio[FIRST[-1]] == 1.0


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_the_plan_is_what_its_durations_make(make: Any) -> None:
    schedule = make(2, 8)
    found = planned(schedule, first_stage_vanishes=True)
    dag = PipelineDag.from_schedule(schedule)
    assert dag.makespan(found.duration_ms) == pytest.approx(found.makespan_ms.planned)
    for action, bounds in times(schedule).items():
        ratio = found.freeze_ratio.get(action, 0.0)
        vanished = action.stage == 0 and ratio == 1.0
        assert found.duration_ms[action] == pytest.approx(0 if vanished else bounds.upper - ratio * BACKWARD / 2)
    assert all(ratio <= 0.8 + 1e-6 for ratio in found.stage_freeze_ratio.values())
    assert found.stage_freeze_ratio[0] == pytest.approx(sum(found.freeze_ratio[a] for a in FIRST) / 8)
    assert found.makespan_ms.fully_frozen < found.makespan_ms.planned < found.makespan_ms.unfrozen


def test_stage_0s_weight_gradients_disappear_too_where_backwards_are_split() -> None:
    schedule = split_one_f_one_b(2, 4)
    found = planned(schedule, first_stage_vanishes=True)
    whole = [a for a, ratio in found.freeze_ratio.items() if a.stage == 0 and ratio == 1.0]
    assert whole
    assert all(found.duration_ms[action] == 0.0 for action in whole)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.125, 1.0])
def test_no_more_backwards_are_whole_than_the_budget_has_room_for(ratio: float) -> None:
    schedule = gpipe(2, 8)
    found = plan(schedule, times(schedule), ratio, first_stage_vanishes=True)
    assert sum(found.freeze_ratio[action] for action in FIRST) <= 8 * ratio + 1e-6
    if ratio == 0.0:
        assert found.mean_freeze_ratio == 0.0
        assert found.makespan_ms.planned == found.makespan_ms.unfrozen


def test_a_target_that_is_met_with_less_freezing_is_met_with_less() -> None:
    schedule = gpipe(2, 8)
    fastest = planned(schedule, first_stage_vanishes=True)
    target = (fastest.makespan_ms.planned + fastest.makespan_ms.unfrozen) / 2
    slower = planned(schedule, first_stage_vanishes=True, target_makespan_ms=target)
    assert slower.makespan_ms.planned <= target * 1.001
    assert slower.mean_freeze_ratio < fastest.mean_freeze_ratio
    assert planned(schedule, first_stage_vanishes=True, target_makespan_ms=1e6).mean_freeze_ratio == 0.0


def test_the_unit_of_time_does_not_matter() -> None:
    schedule = gpipe(2, 8)
    one = planned(schedule, first_stage_vanishes=True)
    scaled = {a: Bounds(b.lower * 1e3, b.upper * 1e3) for a, b in times(schedule).items()}
    other = plan(schedule, scaled, 0.8, first_stage_vanishes=True)
    assert other.freeze_ratio == pytest.approx(one.freeze_ratio, abs=1e-6)


def input_object(**more: Any) -> dict[str, Any]:
    schedule = gpipe(2, 8)
    pairs = {str(action): [bounds.lower, bounds.upper] for action, bounds in times(schedule).items()}
    return {"ranks": schedule.to_text(), "times": pairs, "max_freeze_ratio": 0.8, **more}


def test_an_input_object_may_say_so() -> None:
    found = plan_from_json(input_object(first_stage_vanishes=True))
    assert found.freeze_ratio == planned(gpipe(2, 8), first_stage_vanishes=True).freeze_ratio
    assert plan_from_json(input_object()).freeze_ratio == planned(gpipe(2, 8)).freeze_ratio


@pytest.mark.parametrize("value", [1, "yes", None])
def test_anything_but_true_and_false_is_refused_in_one_line(value: Any) -> None:
    with pytest.raises(PlanInputError, match=r"^first_stage_vanishes: .* is neither true nor false$"):
        plan_from_json(input_object(first_stage_vanishes=value))


def test_a_large_program_ends_no_later_either() -> None:
    schedule = gpipe(4, 80)
    partial, whole = planned(schedule), planned(schedule, first_stage_vanishes=True)
    assert whole.makespan_ms.planned <= partial.makespan_ms.planned
    assert whole.mean_freeze_ratio <= partial.mean_freeze_ratio + 1e-6
