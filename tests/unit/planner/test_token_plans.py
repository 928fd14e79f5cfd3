"""Plans whose ratios are met by sampling tokens: as early as any other, with the least noise."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import changed, plan_problem

from tf_adapters.errors import PlanInputError
from tf_adapters.measuring.token_cost import TokenCost
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.planner.program import FreezeProgram, SolverStatus
from tf_adapters.planner.solve import plan_from_json, solve
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.schedule.orders import gpipe, one_forward_one_backward

COST = TokenCost(0.05, 1.02)
ORDERS = st.sampled_from([gpipe(2, 4), gpipe(3, 5), one_forward_one_backward(2, 6), one_forward_one_backward(4, 8)])


def problem(schedule: PipelineSchedule, **fields: object) -> PlanProblem:
    times = {a: Bounds(1.2, 2.2) if a.freezable else Bounds(1.0, 1.0) for a in schedule.actions}
    return changed(plan_problem(schedule, times, 0.8, token_costs={0: COST}), **fields)


def by_ratio(of: PlanProblem) -> PlanProblem:
    """The same with the least freezing in place of the least noise."""
    return changed(of, token_costs={}, max_action_freeze_ratio=COST.most_frozen)


def noise(plan: FreezePlan) -> float:
    return sum(map(COST.noise, plan.freeze_ratio.values()))


@settings(max_examples=40)
@given(ORDERS, st.floats(0.0, 1.0))
def test_the_plan_ends_as_early_as_one_of_least_freezing_and_is_no_noisier(
    schedule: PipelineSchedule, share: float
) -> None:
    fastest = solve(by_ratio(problem(schedule)))
    target = fastest.makespan_ms.unfrozen + share * (fastest.makespan_ms.planned - fastest.makespan_ms.unfrozen)
    aimed = problem(schedule, target_makespan_ms=target)
    quiet, least = solve(aimed), solve(by_ratio(aimed))
    assert quiet.makespan_ms.planned == pytest.approx(least.makespan_ms.planned, rel=1e-6)
    assert max(quiet.freeze_ratio.values()) <= COST.most_frozen + 1e-9
    assert max(quiet.stage_freeze_ratio.values()) <= 0.8 + 1e-6
    # A line in 16 pieces stands for the noise, from below.
    assert noise(quiet) <= noise(least) + 0.02 * len(quiet.freeze_ratio)


def test_it_is_much_less_noisy_where_little_is_to_be_gained() -> None:
    alone = solve(problem(one_forward_one_backward(4, 8), max_freeze_ratio=0.0)).makespan_ms.planned
    aimed = problem(one_forward_one_backward(4, 8), target_makespan_ms=alone / 1.16)
    assert noise(solve(aimed)) < 0.75 * noise(solve(by_ratio(aimed)))


def test_a_deferred_plan_makes_no_more_noise_either() -> None:
    alone = solve(problem(one_forward_one_backward(4, 8), max_freeze_ratio=0.0)).makespan_ms.planned
    aimed = problem(one_forward_one_backward(4, 8), defer=True, extra_microbatches=4, target_makespan_ms=alone / 1.36)
    quiet, least = solve(aimed), solve(by_ratio(aimed))
    assert quiet.makespan_ms.planned == pytest.approx(least.makespan_ms.planned, rel=1e-6)
    assert noise(quiet) < 0.97 * noise(least)


@given(st.floats(0.0, 0.5), st.floats(0.1, 1.9))
def test_the_price_is_convex_from_zero_and_never_above_the_noise(fixed: float, per_token: float) -> None:
    cost = TokenCost(fixed, per_token)
    corners = FreezeProgram.of(problem(gpipe(2, 2), token_costs={0: cost})).price
    assert corners[0] == (0.0, 0.0)
    slopes = [(high - low) / (end - start) for (start, low), (end, high) in pairwise(corners) if end > start]
    assert all(first <= second * (1 + 1e-9) + 1e-9 for first, second in pairwise(slopes))
    for start, price in corners:
        assert price == pytest.approx(cost.noise(start))


@pytest.mark.parametrize("exact_up_to", [0, 4096])
def test_a_draw_that_saves_nothing_freezes_nothing(exact_up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf_adapters.planner.solve._EXACT_UP_TO", exact_up_to)
    plan = solve(problem(one_forward_one_backward(2, 4), token_costs={1: TokenCost(0.9, 1.0)}))
    assert plan.mean_freeze_ratio == 0.0


def test_a_large_program_meets_what_draws_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf_adapters.planner.solve._EXACT_UP_TO", 10)
    plan = solve(problem(one_forward_one_backward(4, 8)))
    assert plan.solver.name == "interior point"
    assert max(plan.freeze_ratio.values()) <= COST.most_frozen + 1e-6


@settings(max_examples=40)
@given(ORDERS, st.floats(0.0, 1.0), st.integers(0, 2**32 - 1), st.sampled_from([COST, TokenCost(0.2, 0.7)]))
@example(one_forward_one_backward(2, 6), 0.890625, 273492264, TokenCost(0.2, 0.7))
def test_plans_of_large_programs_are_as_early_and_as_quiet_as_the_exact_ones(
    schedule: PipelineSchedule, share: float, seed: int, cost: TokenCost
) -> None:
    pace = random.Random(seed)
    lower = {action: pace.uniform(0.9, 1.1) for action in schedule.actions}
    times = {a: Bounds(ms, ms + pace.uniform(0.9, 1.1) * a.freezable) for a, ms in lower.items()}
    aimed = problem(schedule, times=times, token_costs={0: cost})
    fastest = solve(aimed).makespan_ms
    target = fastest.unfrozen + share * (fastest.planned - fastest.unfrozen)
    aimed = changed(aimed, target_makespan_ms=target)
    exact = solve(aimed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tf_adapters.planner.solve._EXACT_UP_TO", 10)
        large = solve(aimed)
    assert large.solver.name == "interior point" or exact.solver.status is SolverStatus.NOT_NEEDED
    assert large.makespan_ms.planned <= max(target, exact.makespan_ms.planned) * (1 + 1e-4)
    assert max(large.freeze_ratio.values()) <= cost.most_frozen + 1e-6
    noises = [sum(map(cost.noise, plan.freeze_ratio.values())) for plan in (exact, large)]
    assert noises[1] <= 1.02 * noises[0] + 0.01 * len(large.freeze_ratio)


def test_the_input_carries_it() -> None:
    data = json.loads(json.dumps(problem(one_forward_one_backward(2, 4)).to_json()))
    assert data["token_costs"] == {"0": [0.05, 1.02]}
    alone = {**data, "token_cost": data["token_costs"]["0"]}
    assert PlanProblem.from_json({k: v for k, v in alone.items() if k != "token_costs"}) == PlanProblem.from_json(data)
    assert plan_from_json(data).freeze_ratio == solve(problem(one_forward_one_backward(2, 4))).freeze_ratio
    assert "token_costs" not in by_ratio(problem(gpipe(2, 2))).to_json()


@pytest.mark.parametrize("value", [0.1, [0.1], [0.1, "x"], [-0.1, 1.0], [0.1, 0.0], [float("nan"), 1.0], {}])
def test_a_wrong_cost_is_refused_by_name(value: object) -> None:
    with pytest.raises(PlanInputError, match=r"^token_costs\[0\]: "):
        PlanProblem.from_json({**problem(gpipe(2, 2)).to_json(), "token_cost": value})
