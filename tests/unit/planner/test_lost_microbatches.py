"""Limits of single ratios: no microbatch is lost, and no action freezes more than it can."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import changed, plan_problem

from tf_adapters.errors import PlanInputError
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.schedule.orders import gpipe, interleaved, one_forward_one_backward

ORDERS = st.sampled_from(
    [one_forward_one_backward(2, 4), one_forward_one_backward(4, 8), gpipe(3, 5), interleaved(2, 4)]
)
TOLERANCE = 1e-6


def problem(schedule: PipelineSchedule, times: dict[str, float] | None = None, **limits: float | bool) -> PlanProblem:
    spare = times or {}
    return plan_problem(
        schedule,
        {
            a: Bounds(12.0, 22.0 + spare.get(str(a), 0.0)) if a.freezable else Bounds(10.0, 10.0)
            for a in schedule.actions
        },
        **{"max_freeze_ratio": 0.8, **limits},  # type: ignore[arg-type]
    )


def means(plan: object) -> dict[int, float]:
    by_microbatch: dict[int, list[float]] = {}
    for action, ratio in plan.freeze_ratio.items():  # type: ignore[attr-defined]
        by_microbatch.setdefault(action.microbatch, []).append(ratio)
    return {microbatch: sum(ratios) / len(ratios) for microbatch, ratios in by_microbatch.items()}


@settings(max_examples=30)
@given(ORDERS, st.floats(0.0, 1.0), st.data())
def test_no_microbatch_is_frozen_above_the_limit_on_all_stages(
    schedule: PipelineSchedule, ratio: float, data: st.DataObject
) -> None:
    spare = {str(action): data.draw(st.floats(0.0, 4.0), str(action)) for action in schedule.actions}
    limit = Limits.of_training(ratio).max_microbatch_freeze_ratio
    plan = solve(problem(schedule, spare, max_freeze_ratio=ratio, max_microbatch_freeze_ratio=limit))
    assert max(means(plan).values()) <= limit + TOLERANCE
    assert max(plan.stage_freeze_ratio.values()) <= ratio + TOLERANCE


@pytest.mark.parametrize("limit", [0.0, 0.01, 0.2, 0.25, 0.3])
@pytest.mark.parametrize("exact_up_to", [10, 4_096], ids=["interior point", "GLOP"])
def test_a_limit_below_one_stage_of_a_microbatch_is_kept(
    limit: float, exact_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage alone, frozen whole, would be a quarter of the microbatch."""
    monkeypatch.setattr("tf_adapters.planner.solve._EXACT_UP_TO", exact_up_to)
    plan = solve(problem(one_forward_one_backward(4, 8), max_microbatch_freeze_ratio=limit))
    assert max(means(plan).values()) <= limit + TOLERANCE
    assert plan.makespan_ms.planned < plan.makespan_ms.unfrozen or limit == 0.0


def test_the_fastest_plan_of_1f1b_loses_the_last_microbatch_and_the_limited_one_does_not() -> None:
    schedule = one_forward_one_backward(4, 8)
    fastest, limited = (solve(problem(schedule, max_microbatch_freeze_ratio=limit)) for limit in (1.0, 0.9))
    assert means(fastest)[7] == pytest.approx(1.0)
    assert means(limited)[7] <= 0.9 + TOLERANCE
    assert fastest.makespan_ms.planned < limited.makespan_ms.planned < 1.02 * fastest.makespan_ms.planned


def test_deferral_makes_the_limit_free() -> None:
    deferred = problem(one_forward_one_backward(4, 8), defer=True, extra_microbatches=4)
    free, limited = (solve(changed(deferred, max_microbatch_freeze_ratio=limit)) for limit in (1.0, 0.9))
    assert limited.makespan_ms.planned == pytest.approx(free.makespan_ms.planned, rel=1e-6)


@settings(max_examples=30)
@given(ORDERS, st.floats(0.0, 1.0))
def test_no_action_freezes_more_than_its_limit_and_the_plan_is_proven_best(
    schedule: PipelineSchedule, most: float
) -> None:
    plan = solve(problem(schedule, max_action_freeze_ratio=most))
    assert max(plan.freeze_ratio.values()) <= most + TOLERANCE
    assert plan.solver.optimality_gap <= 1e-6
    shorter = problem(schedule, max_freeze_ratio=min(1.0, 0.8 / most) if most else 0.0)
    times = {
        a: Bounds(b.upper - most * (b.upper - b.lower), b.upper) for a, b in shorter.measurement.times.items()
    }  # ratios of it are shares of the limit
    same = solve(changed(shorter, times=times))
    assert plan.makespan_ms.planned == pytest.approx(same.makespan_ms.planned, rel=1e-6)


def test_a_large_program_keeps_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf_adapters.planner.solve._EXACT_UP_TO", 10)
    plan = solve(problem(one_forward_one_backward(4, 8), max_action_freeze_ratio=0.7))
    assert plan.solver.name == "interior point"
    assert max(plan.freeze_ratio.values()) <= 0.7 + TOLERANCE
    assert plan.solver.optimality_gap <= 1e-3
    limited = solve(problem(one_forward_one_backward(4, 8), max_microbatch_freeze_ratio=0.85))
    assert max(means(limited).values()) <= 0.85 + TOLERANCE


@pytest.mark.parametrize("field", ["max_action_freeze_ratio", "max_microbatch_freeze_ratio"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "much"])
def test_a_wrong_limit_is_refused_by_name(field: str, value: object) -> None:
    data = {**problem(gpipe(2, 2)).to_json(), field: value}
    with pytest.raises(PlanInputError, match=rf"^{field}: "):
        PlanProblem.from_json(data)
