"""The interior point method of large pipelines against GLOP, which solves the same programs exactly."""

from __future__ import annotations

import numpy as np
import pytest
from problems import plan_problem
from schedules import gpipe, one_f_one_b, split_gpipe, split_one_f_one_b, v_shape

import tf_adapters.planner.interior as method
import tf_adapters.planner.solve as planner
from tf_adapters.errors import SolverError
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.program import Flow, FreezeProgram, Optimum, SolverStatus
from tf_adapters.planner.solve import plan, solve
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule

CLOSE = 1e-3  # the gap that is promised above the sizes that GLOP solves


def noisy_times(schedule: PipelineSchedule, seed: int, spread: float = 0.1) -> dict[Action, tuple[float, float]]:
    random = np.random.default_rng(seed)
    upper = {action: 10.0 * random.uniform(1 - spread, 1 + spread) for action in schedule.actions}
    return {action: (ms * (0.5 if action.freezable else 1.0), ms) for action, ms in upper.items()}


def equal_times(schedule: PipelineSchedule) -> dict[Action, tuple[float, float]]:
    """What users try first: 10 ms forwards, 20 ms backwards, half of it weight gradients."""
    return {action: (10.0, 20.0) if action.freezable else (10.0, 10.0) for action in schedule.actions}


@pytest.fixture
def interior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size takes the way of large ones."""
    monkeypatch.setattr(planner, "_EXACT_UP_TO", 0)


def both(
    schedule: PipelineSchedule, times: dict[Action, tuple[float, float]], ratio: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[FreezePlan, FreezePlan]:
    """The plan of GLOP, and that of the interior point method."""
    exact = plan(schedule, times, ratio)
    monkeypatch.setattr(planner, "_EXACT_UP_TO", 0)
    return exact, plan(schedule, times, ratio)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, split_gpipe, split_one_f_one_b, v_shape])
@pytest.mark.parametrize("ratio", [1e-6, 0.3, 0.8, 1.0])
def test_it_plans_as_glop_does(make, ratio, monkeypatch):
    schedule = make(4, 12)
    exact, near = both(schedule, noisy_times(schedule, seed=1), ratio, monkeypatch)
    assert exact.solver.name == "GLOP"
    assert near.solver.name == "interior point"
    assert near.makespan_ms.planned == pytest.approx(exact.makespan_ms.planned, rel=3e-4)
    assert near.mean_freeze_ratio <= exact.mean_freeze_ratio + 0.01
    assert all(mean <= ratio + 1e-9 for mean in near.stage_freeze_ratio.values())
    assert all(0.0 <= r <= 1.0 for r in near.freeze_ratio.values())


@pytest.mark.parametrize("share", [0.8, 0.9, 0.97, 1.1])
def test_a_target_is_reached_with_as_little_freezing_as_glop_needs(share, monkeypatch):
    schedule = one_f_one_b(4, 12)
    times = noisy_times(schedule, seed=9)
    target = share * plan(schedule, times, 0.0).makespan_ms.unfrozen
    exact = plan(schedule, times, 0.8, target_makespan_ms=target)
    monkeypatch.setattr(planner, "_EXACT_UP_TO", 0)
    near = plan(schedule, times, 0.8, target_makespan_ms=target)
    assert near.makespan_ms.planned == pytest.approx(exact.makespan_ms.planned, rel=1e-4)
    assert near.mean_freeze_ratio == pytest.approx(exact.mean_freeze_ratio, abs=0.005)


@pytest.mark.parametrize("seed", range(8))
def test_the_gap_that_it_proves_holds(seed, monkeypatch):
    schedule = one_f_one_b(6, 16)
    exact, near = both(schedule, noisy_times(schedule, seed, spread=0.5), 0.7, monkeypatch)
    best = near.makespan_ms.planned * (1 - near.solver.optimality_gap)
    assert best <= exact.makespan_ms.planned * (1 + 1e-9)
    assert near.solver.optimality_gap <= CLOSE


@pytest.mark.usefixtures("interior")
@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_the_unit_of_time_does_not_matter(unit):
    schedule = one_f_one_b(4, 8)
    times = noisy_times(schedule, seed=2)
    scaled = {action: (low * unit, high * unit) for action, (low, high) in times.items()}
    ours, other = plan(schedule, times, 0.8), plan(schedule, scaled, 0.8)
    assert other.freeze_ratio == pytest.approx(ours.freeze_ratio, abs=1e-6)


@pytest.mark.usefixtures("interior")
@pytest.mark.parametrize("times", [(0.0, 0.0), (0.0, 5.0)], ids=["nothing takes time", "backwards can vanish"])
def test_degenerate_times(times):
    schedule = one_f_one_b(3, 6)
    made = plan(schedule, {action: times if action.freezable else (0.0, 0.0) for action in schedule.actions}, 0.5)
    assert made.solver.optimality_gap <= CLOSE
    assert made.makespan_ms.planned <= made.makespan_ms.unfrozen


def test_a_large_pipeline():
    schedule = one_f_one_b(16, 256)
    made = plan(schedule, noisy_times(schedule, seed=3), 0.8)
    assert made.solver.name == "interior point"
    assert made.solver.optimality_gap <= CLOSE
    assert made.makespan_ms.planned < 0.8 * made.makespan_ms.unfrozen


@pytest.mark.parametrize("make", [one_f_one_b, gpipe, split_one_f_one_b])
def test_equal_times_need_no_second_solver(make, monkeypatch):
    monkeypatch.setattr(planner, "solve_glop", lambda *_: pytest.fail("GLOP was asked"))
    schedule = make(32, 80)
    made = plan(schedule, equal_times(schedule), 0.8)
    assert len(schedule.actions) > 4096
    assert (made.solver.name, made.solver.status) == ("interior point", SolverStatus.OPTIMAL)
    assert made.solver.optimality_gap <= CLOSE


def test_first_steps_that_do_not_lower_the_error_are_not_the_last(monkeypatch):
    """64 ranks, 256 microbatches, equal times: while the objective falls, the error relative to it rises."""
    monkeypatch.setattr(planner, "solve_glop", lambda *_: pytest.fail("GLOP was asked"))
    monkeypatch.setattr(method, "_TOLERANCE", 1e-3)  # which would be enough for the gap
    schedule = one_f_one_b(64, 256)
    made = plan(schedule, equal_times(schedule), 0.8)
    assert made.solver.optimality_gap <= CLOSE


def test_up_to_4096_actions_the_plan_is_exact():
    schedule = one_f_one_b(16, 128)
    made = plan(schedule, noisy_times(schedule, seed=4), 0.8)
    assert len(schedule.actions) == 4096
    assert made.solver.optimality_gap < 1e-6


@pytest.mark.usefixtures("interior")
def test_out_of_time_is_a_solver_error():
    schedule = one_f_one_b(4, 8)
    with pytest.raises(SolverError, match="NOT_SOLVED: out of time"):
        plan(schedule, noisy_times(schedule, seed=5), 0.8, time_limit_s=1e-9)


@pytest.mark.usefixtures("interior")
def test_glop_takes_over_where_the_proof_is_weak(monkeypatch):
    monkeypatch.setattr(planner, "_WIDEST_GAP", -1.0)
    schedule = one_f_one_b(4, 8)
    made = plan(schedule, noisy_times(schedule, seed=6), 0.8)
    assert made.solver.name == "GLOP"
    assert made.solver.optimality_gap < 1e-6


@pytest.mark.usefixtures("interior")
@pytest.mark.parametrize(
    ("time_limit_s", "most"), [(None, planner._SECOND_TRY_S), (1e3, planner._SECOND_TRY_S), (5, 5)]
)
def test_its_plan_stands_where_glop_fails_within_its_time(time_limit_s, most, monkeypatch):
    limits = []

    def fail(_: object, limit_s: float, __: float) -> None:
        limits.append(limit_s)
        raise SolverError("GLOP ended NOT_SOLVED")

    monkeypatch.setattr(planner, "_WIDEST_GAP", -1.0)
    monkeypatch.setattr(planner, "solve_glop", fail)
    schedule = one_f_one_b(4, 8)
    made = plan(schedule, noisy_times(schedule, seed=7), 0.8, time_limit_s=time_limit_s)
    assert (made.solver.name, made.solver.status) == ("interior point", SolverStatus.FEASIBLE)
    assert made.solver.optimality_gap <= CLOSE
    assert 0.0 < limits[0] <= most


@pytest.mark.usefixtures("interior")
def test_its_plan_stands_where_glops_is_worse(monkeypatch):
    def nothing(program: FreezeProgram, *_: object) -> Optimum:
        no_flow = Flow(np.zeros(len(program.dag.edges.sources)), np.zeros_like(program.upper))
        return Optimum(np.zeros_like(program.upper), no_flow)

    monkeypatch.setattr(planner, "_WIDEST_GAP", -1.0)
    monkeypatch.setattr(planner, "solve_glop", nothing)
    schedule = one_f_one_b(4, 8)
    made = plan(schedule, noisy_times(schedule, seed=7), 0.8)
    assert (made.solver.name, made.solver.status) == ("interior point", SolverStatus.FEASIBLE)


@pytest.mark.usefixtures("interior")
def test_a_usable_iterate_is_returned_when_time_is_up(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(method.time, "monotonic", lambda: next(clock))  # a second for every look at it
    monkeypatch.setattr(method, "_USABLE", 1e-1)
    monkeypatch.setattr(planner, "_WIDEST_GAP", 1.0)
    schedule = one_f_one_b(4, 8)
    times = noisy_times(schedule, seed=5)
    made = plan(schedule, times, 0.8, time_limit_s=9)
    assert made.makespan_ms.planned < made.makespan_ms.unfrozen
    assert 0.0 < made.solver.optimality_gap < 0.1


@pytest.mark.usefixtures("interior")
def test_progress_is_told_at_every_step():
    schedule = one_f_one_b(4, 8)
    problem = plan_problem(schedule, {a: Bounds(*pair) for a, pair in equal_times(schedule).items()}, 0.8)
    told: list[str] = []
    solve(problem, progress=told.append)
    assert told[0] == "64 actions"
    assert told[1].startswith("interior point, step 1: ")
    assert len(told) > 5
