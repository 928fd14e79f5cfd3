"""Plans for steps that overlap: the period against another solver, its proof, and orders with the least period."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import changed, plan_problem
from schedules import gpipe, one_f_one_b, split_gpipe, split_one_f_one_b, v_shape
from scipy.optimize import linprog

import tf_adapters.planner.solve as planner
from tf_adapters.cli import main
from tf_adapters.errors import PlanInputError
from tf_adapters.planner.forecast import forecast
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.schedule.deferral import most_in_flight
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.schedule.period import PeriodicDag

MAKERS = [gpipe, one_f_one_b, split_gpipe, split_one_f_one_b, v_shape]


def overlapping(make, stages: int, microbatches: int, seed: int, ratio: float, spread: float = 0.5) -> PlanProblem:
    """Random times, transfers and times between steps."""
    schedule, random = make(stages, microbatches), np.random.default_rng(seed)
    upper = {action: 10.0 * random.uniform(1 - spread, 1 + spread) for action in schedule.actions}
    times = {action: Bounds(ms * (0.5 if action.freezable else 1.0), ms) for action, ms in upper.items()}
    return plan_problem(
        schedule,
        times,
        ratio,
        communication={edge: float(random.uniform(0.0, 3.0)) for edge in schedule.transfers()},
        steps="overlap",
        between_steps={rank: float(random.uniform(0.0, 20.0)) for rank in range(len(schedule.ranks))},
    )


def least_period(problem: PlanProblem) -> float:
    """HiGHS: the period T, start times and freeze ratios at once."""
    dag, times = problem.measurement.dag, problem.measurement.times
    count = len(dag.actions)
    rows, right = [], []

    def after(source: int, target: int, delay: float, turns: float) -> None:
        """start(target) + turns * T - start(source) + ratio(source) * range >= upper(source) + delay."""
        bounds = times[dag.actions[source]]
        row = np.zeros(2 * count + 1)
        row[source] += 1.0
        row[target] -= 1.0
        row[count + source] = -(bounds.upper - bounds.lower)
        row[-1] = -turns
        rows.append(row)
        right.append(-(bounds.upper + delay))

    for source, target, delay in zip(*dag.edges, strict=True):
        after(source, target, delay, turns=0.0)
    for source, target, delay in zip(*dag.loops, strict=True):
        after(source, target, delay, turns=1.0)
    for stage in range(problem.measurement.schedule.num_stages):
        own = [i for i, action in enumerate(dag.actions) if action.stage == stage and action.freezable]
        row = np.zeros(2 * count + 1)
        row[[count + i for i in own]] = 1.0
        rows.append(row)
        right.append(problem.limits.max_freeze_ratio * len(own))
    limits = [(0.0, None)] * count + [(0.0, 1.0 if action.freezable else 0.0) for action in dag.actions] + [(0.0, None)]
    cost = np.zeros(2 * count + 1)
    cost[-1] = 1.0
    solved = linprog(cost, A_ub=np.array(rows), b_ub=right, bounds=limits)
    assert solved.status == 0
    return float(solved.fun)


def assert_repeats(problem: PlanProblem, plan: FreezePlan) -> None:
    """The plan's starts and durations satisfy every edge, also those to the next step."""
    dag = problem.measurement.dag_of(plan.schedule or problem.measurement.schedule, problem.measurement.gaps)
    assert isinstance(dag, PeriodicDag)
    assert plan.period_ms is not None
    start, length = dag.durations(plan.start_ms), dag.durations(plan.duration_ms)
    for source, target, delay in zip(*dag.edges, strict=True):
        assert start[target] >= start[source] + length[source] + delay - 1e-6
    for source, target, delay in zip(*dag.loops, strict=True):
        assert start[target] + plan.period_ms.planned >= start[source] + length[source] + delay - 1e-6


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_the_period_is_the_least_that_another_solver_finds(make, ratio):
    for size in ((1, 3), (2, 4), (4, 6)):
        problem = overlapping(make, *size, seed=sum(size), ratio=ratio)
        plan = solve(problem)
        assert plan.period_ms is not None
        assert plan.period_ms.planned == pytest.approx(least_period(problem), rel=1e-6)
        assert plan.solver.optimality_gap < 1e-6
        assert_repeats(problem, plan)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_the_interior_point_method_plans_the_same_period(make, ratio, monkeypatch):
    problem = overlapping(make, 4, 12, seed=3, ratio=ratio)
    exact = solve(problem)
    monkeypatch.setattr(planner, "_EXACT_UP_TO", 0)
    near = solve(problem)
    assert (exact.solver.name, near.solver.name) == ("GLOP", "interior point")
    assert near.span_ms.planned == pytest.approx(exact.span_ms.planned, rel=3e-4)
    assert near.span_ms.planned * (1.0 - near.solver.optimality_gap) <= exact.span_ms.planned * (1.0 + 1e-9)
    assert near.solver.optimality_gap <= 1e-3
    assert near.mean_freeze_ratio <= exact.mean_freeze_ratio + 0.01


@pytest.mark.parametrize("share", [0.85, 0.95])
def test_a_target_is_reached_with_as_little_freezing_by_both_methods(share, monkeypatch):
    problem = overlapping(one_f_one_b, 4, 12, seed=9, ratio=0.8)
    target = share * solve(changed(problem, max_freeze_ratio=0.0)).span_ms.planned
    exact = solve(changed(problem, target_makespan_ms=target))
    monkeypatch.setattr(planner, "_EXACT_UP_TO", 0)
    near = solve(changed(problem, target_makespan_ms=target))
    assert exact.span_ms.planned == pytest.approx(target, rel=1e-6)
    assert near.span_ms.planned == pytest.approx(target, rel=1e-4)
    assert near.mean_freeze_ratio == pytest.approx(exact.mean_freeze_ratio, abs=0.005)


@given(
    make=st.sampled_from(MAKERS),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
@settings(max_examples=60)
def test_a_period_is_between_the_busiest_rank_and_the_batch_and_its_cycle_adds_up(
    make, stages, microbatches, seed, scale
):
    measurement = overlapping(make, stages, microbatches, seed=seed, ratio=0.0).measurement
    dag, schedule = measurement.dag, measurement.schedule
    durations = {action: ms * scale for action, ms in measurement.upper.items()}
    between = {rank: ms * scale for rank, ms in measurement.between_steps.items()}
    dag = PeriodicDag.of(dag.with_delays(lambda ms: ms * scale), schedule, between)
    busy = [sum(durations[a] for a in row) + between[rank] for rank, row in enumerate(schedule.ranks)]
    period = dag.span_ms(durations)
    assert max(busy) * (1 - 1e-9) <= period <= (dag.makespan(durations) + max(between.values())) * (1 + 1e-9)
    cycle = dag.critical_path(durations)
    length = _cycle_length(dag, cycle, durations)
    assert length / period == pytest.approx(round(length / period), rel=1e-6)


def _cycle_length(dag: PeriodicDag, cycle: tuple[Action, ...], durations: dict[Action, float]) -> float:
    steps = [*zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    delays: dict[tuple[Action, Action], float] = {}
    for edges in (dag.loops, dag.edges):
        for source, target, delay in zip(*edges, strict=True):
            delays[dag.actions[source], dag.actions[target]] = delay
    return sum(durations[source] + delays[source, target] for source, target in steps)


def balanced(stages: int, microbatches: int, extra: int, times: tuple[float, float, float]) -> PlanProblem:
    """Equal stages; a forward, an input gradient and a weight gradient take ``times``; nothing is frozen."""
    forward, inputs, weights = times
    of_kind = {Kind.FORWARD: Bounds(forward, forward), Kind.BACKWARD: Bounds(inputs, inputs + weights)}
    schedule = one_f_one_b(stages, microbatches)
    every = {action: of_kind[action.kind] for action in schedule.actions}
    return plan_problem(schedule, every, 0.0, defer=True, extra_microbatches=extra, steps="overlap")


@pytest.mark.parametrize(
    ("stages", "microbatches", "extra", "times", "least"),
    [
        (4, 8, 0, (1.0, 1.0, 1.0), 1.22),
        (4, 8, 2, (1.0, 1.0, 1.0), 1.32),
        (4, 8, 4, (1.0, 1.0, 1.0), 1.375),
        (8, 16, 4, (1.0, 1.0, 1.0), 1.35),
        (8, 16, 8, (1.0, 1.0, 1.0), 1.437),
        (4, 16, 4, (1.0, 1.0, 1.0), 1.187),
        (4, 8, 4, (1.0, 1.2, 1.0), 1.335),
        (8, 16, 8, (1.0, 1.2, 1.0), 1.40),
    ],
)
def test_deferral_reaches_nearly_a_pipeline_without_bubbles(stages, microbatches, extra, times, least):
    problem = balanced(stages, microbatches, extra=extra, times=times)
    plan = solve(problem)
    assert plan.period_ms is not None
    assert plan.period_ms.host is not None
    assert plan.period_ms.host == pytest.approx((microbatches + stages - 1) * sum(times))
    assert plan.period_ms.host / plan.period_ms.planned >= least
    assert plan.mean_freeze_ratio == 0.0
    assert plan.schedule is not None
    assert most_in_flight(plan.schedule) <= stages + extra
    assert_repeats(problem, plan)


def test_four_by_eight_with_four_more_microbatches_is_within_three_percent_of_the_bound():
    plan = solve(balanced(4, 8, extra=4, times=(1.0, 1.2, 1.0)))
    assert plan.span_ms.planned <= 1.03 * 8 * 3.2


def test_freezing_still_shortens_what_deferral_leaves():
    problem = changed(balanced(4, 8, extra=0, times=(1.0, 1.0, 1.0)), max_freeze_ratio=0.3)
    exact, frozen = solve(changed(problem, max_freeze_ratio=0.0)), solve(problem)
    assert frozen.span_ms.planned < 0.95 * exact.span_ms.planned
    assert frozen.span_ms.host == exact.span_ms.host


def test_the_forecast_of_a_step_is_the_period():
    problem = balanced(4, 8, extra=4, times=(10.0, 10.0, 10.0))
    measurement = problem.measurement.of_step(350.0)
    plan = solve(problem)
    assert measurement.other_ms == pytest.approx(20.0)
    assert forecast(measurement, plan).planned_ms == pytest.approx(240.0 + 20.0)


def test_a_plan_without_overlap_has_no_period_and_keeps_its_form():
    met = solve(changed(overlapping(one_f_one_b, 3, 4, seed=1, ratio=0.5), steps="meet"))
    assert met.period_ms is None
    assert "period_ms" not in met.to_json()
    assert met.span_ms is met.makespan_ms


def test_measurement_and_plan_come_back_from_json():
    problem = overlapping(one_f_one_b, 3, 4, seed=1, ratio=0.5)
    again = PlanProblem.from_json(json.loads(json.dumps(problem.to_json())))
    assert again == problem
    plan = solve(problem)
    assert FreezePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_command_plans_for_steps_that_overlap(tmp_path, capsys):
    problem = changed(balanced(4, 8, extra=0, times=(1.0, 1.2, 1.0)), steps="meet", defer=False)
    path, out = tmp_path / "input.json", tmp_path / "plan.json"
    path.write_text(json.dumps(problem.to_json()))
    command = ["plan", str(path), "--defer", "--extra-microbatches", "4", "--out", str(out)]
    assert main([*command, "--steps", "overlap"]) == 0
    plan = json.loads(out.read_text())
    assert set(plan["period_ms"]) == {"host", "unfrozen", "planned", "fully_frozen"}
    assert plan["period_ms"]["planned"] <= 1.03 * 8 * 3.2 < plan["makespan_ms"]["planned"]
    assert capsys.readouterr().out.startswith(f"{out}: period 35.2 ms in the host's order")
    assert main(command) == 0
    assert "period_ms" not in json.loads(out.read_text())
    with pytest.raises(SystemExit) as ended:
        main([*command, "--steps", "never"])
    assert ended.value.code == 2
    assert "'never' (choose from 'meet', 'overlap')" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": "often"}, "steps"),
        ({"between_steps": {"0": -1.0}}, "between_steps"),
        ({"between_steps": {"9": 1.0}}, "between_steps: 9 is not a rank: allowed are 0 to 2"),
    ],
)
def test_wrong_input_is_refused_in_one_line(wrong, message):
    problem = overlapping(one_f_one_b, 3, 4, seed=1, ratio=0.5)
    with pytest.raises(PlanInputError, match=message) as caught:
        PlanProblem.from_json({**problem.to_json(), **wrong})
    assert "\n" not in str(caught.value)
