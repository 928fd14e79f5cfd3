"""Which plan pays, and when it is changed."""

from __future__ import annotations

import math

import pytest
from problems import plan_problem
from schedules import one_f_one_b

from tf_adapters.errors import PlanInputError
from tf_adapters.measuring.learning import Learning, StageLearning
from tf_adapters.measuring.token_cost import TokenCost
from tf_adapters.planner.freeze_plan import FreezePlan, FrontierPoint
from tf_adapters.planner.frontier import best_point, describe_frontier
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.planner.solve import plan_from_json, solve
from tf_adapters.schedule.durations import Bounds

STAGES, MICROBATCHES = 4, 8
SCHEDULE = one_f_one_b(STAGES, MICROBATCHES)
TIMES = {a: Bounds(12.0, 22.0) if a.freezable else Bounds(10.0, 10.0) for a in SCHEDULE.actions}


def learning(signal: float, error: float = 0.0, draws: float | None = None) -> Learning:
    of_stage = StageLearning(signal, error, draws, TokenCost(0.1, 1.0))
    return Learning(dict.fromkeys(range(STAGES), of_stage))


def paying(of: Learning, **limits) -> FreezePlan:
    return solve(plan_problem(SCHEDULE, TIMES, **{"max_freeze_ratio": 0.8, **limits}, learning=of))


def test_noisy_gradients_are_not_frozen_and_clear_ones_are():
    assert paying(learning(0.0)).mean_freeze_ratio == 0.0
    clear = paying(learning(1.0))
    most = solve(plan_problem(SCHEDULE, TIMES, 0.8))
    assert clear.makespan_ms.planned == pytest.approx(most.makespan_ms.planned)


def test_the_frontier_goes_from_nothing_to_the_most_and_has_the_plan_on_it():
    plan = paying(learning(0.9))
    ratios = [point.mean_freeze_ratio for point in plan.frontier]
    spans = [point.makespan_ms for point in plan.frontier]
    assert ratios[0] == 0.0
    assert ratios == sorted(ratios)
    assert spans == sorted(spans, reverse=True)
    (chosen,) = [point for point in plan.frontier if point.chosen]
    assert chosen.makespan_ms == plan.makespan_ms.planned
    assert chosen.mean_freeze_ratio == plan.mean_freeze_ratio
    assert chosen.progress_in_time == max(point.progress_in_time for point in plan.frontier)


def test_draws_cost_what_their_noise_says():
    assert paying(learning(0.5, draws=10.0)).mean_freeze_ratio == 0.0
    assert paying(learning(0.5, draws=0.01)).mean_freeze_ratio > 0.2


def test_a_stage_that_computes_nothing_makes_no_progress():
    plan = solve(plan_problem(SCHEDULE, TIMES, 1.0, learning=learning(0.9)))
    assert plan.frontier[-1].added_noise[STAGES - 1] == math.inf
    assert plan.frontier[-1].progress < 0.75
    assert FreezePlan.from_json(plan.to_json()) == plan


def test_what_a_step_takes_besides_the_batch_makes_freezing_pay_less():
    alone, beside = (paying(learning(0.97), other_ms=ms).frontier[-1].speed for ms in (0.0, 1000.0))
    assert 1.0 < beside < alone


def test_with_deferral_the_frontier_begins_with_the_exact_plan():
    plan = paying(learning(0.0), defer=True, extra_microbatches=4)
    assert plan.mean_freeze_ratio == 0.0
    assert plan.frontier[0].speed > 1.2
    assert plan.makespan_ms.planned < plan.makespan_ms.host


def test_a_target_ends_the_frontier():
    target = 0.9 * solve(plan_problem(SCHEDULE, TIMES, 0.0)).makespan_ms.planned
    plan = paying(learning(1.0), target_makespan_ms=target)
    assert plan.makespan_ms.planned == pytest.approx(target)


def points(*speeds: float) -> list[FrontierPoint]:
    return [
        FrontierPoint(1.0, 0.1 * number, speed, {0: float(number)}, 1.0, 0.0, chosen=False)
        for number, speed in enumerate(speeds)
    ]


@pytest.mark.parametrize(
    ("speed", "error", "best"),
    [(2.11, 0.0, 1), (2.09, 0.0, 0), (2.2, 0.01, 1), (2.2, 0.2, 0)],
)
def test_another_plan_is_taken_where_it_is_clearly_better(speed, error, best):
    of = Learning({0: StageLearning(0.0, error)})  # with twice the noise a step makes half the progress
    assert best_point(points(1.0, speed), of, current=0) == best


def test_adam_feels_the_square_root_of_the_noise():
    plain, adaptive = (Learning({0: StageLearning(0.0, 0.1)}, adaptive=a).progress({0: 3.0}) for a in (False, True))
    assert (plain.share, adaptive.share) == (0.25, 0.5)
    assert adaptive.error == pytest.approx(plain.error)  # d sqrt(p) = dp / (2 sqrt(p))


@pytest.mark.parametrize(
    ("speed", "error", "best"),
    [(2.06, 0.0, 1), (2.04, 0.0, 0), (1.9, 0.0, 0), (2.06, 0.1, 0)],
)
def test_a_plan_that_freezes_stays_while_it_still_pays(speed, error, best):
    of = Learning({0: StageLearning(0.0, error)})
    assert best_point(points(1.0, speed), of, current=1) == best


def test_another_plan_that_freezes_takes_the_place_of_one_that_no_longer_pays():
    of = Learning({0: StageLearning(0.0, 0.0)})  # points make 1, 1/2 and 1/3 of the progress
    assert best_point(points(1.0, 1.9, 3.2), of, current=1) == 2
    assert best_point(points(1.0, 2.1, 3.2), of, current=1) == 1  # better by 2% only


def test_it_says_what_it_chose_from():
    assert "0.00 pays best: a step is 1.00x as fast" in describe_frontier(paying(learning(0.0)))
    unsure = describe_frontier(paying(learning(0.97, error=0.5)))
    assert "0.00 is taken" in unsure
    assert "which is not clearly more" in unsure


def test_the_problem_survives_json_and_wrong_learning_is_refused():
    problem = plan_problem(SCHEDULE, TIMES, 0.8, learning=learning(0.9, 0.01, draws=0.3))
    assert PlanProblem.from_json(problem.to_json()) == problem.validate()
    data = problem.to_json()
    for wrong, message in (
        ({"stages": {"9": [0.5, 0.1]}, "other_ms": 0.0, "adaptive": False}, "learning.stages: 9 is not a stage"),
        (
            {"stages": {"0": [1.5, 0.1]}, "adaptive": True},
            r"learning\['stages'\]\['0'\]\['signal'\]: 1.5",
        ),
        ({"stages": {"0": [0.5]}}, r"learning\['stages'\]\['0'\]\['error'\]: missing"),
        (3, "learning: 3 is not a dictionary"),
    ):
        with pytest.raises(PlanInputError, match=message):
            plan_from_json({**data, "learning": wrong})
