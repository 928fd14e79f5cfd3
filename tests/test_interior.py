"""The interior point method of large pipelines against GLOP, which solves the same programs exactly."""

from __future__ import annotations

import numpy as np
import pytest
from schedules import gpipe, one_f_one_b, split_gpipe, split_one_f_one_b, v_shape

import tf_adapters.planner.solve as planner
from tf_adapters.errors import SolverError
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.program import SolverStatus
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.ir import Action, PipelineSchedule

CLOSE = 1e-3  # the gap that is promised above the sizes that GLOP solves


def noisy_times(schedule: PipelineSchedule, seed: int, spread: float = 0.1) -> dict[Action, tuple[float, float]]:
    random = np.random.default_rng(seed)
    upper = {action: 10.0 * random.uniform(1 - spread, 1 + spread) for action in schedule.actions}
    return {action: (ms * (0.5 if action.freezable else 1.0), ms) for action, ms in upper.items()}


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
    found = plan(schedule, {action: times if action.freezable else (0.0, 0.0) for action in schedule.actions}, 0.5)
    assert found.solver.optimality_gap <= CLOSE
    assert found.makespan_ms.planned <= found.makespan_ms.unfrozen


def test_a_large_pipeline():
    schedule = one_f_one_b(16, 256)
    found = plan(schedule, noisy_times(schedule, seed=3), 0.8)
    assert found.solver.name == "interior point"
    assert found.solver.optimality_gap <= CLOSE
    assert found.makespan_ms.planned < 0.8 * found.makespan_ms.unfrozen


def test_up_to_4096_actions_the_plan_is_exact():
    schedule = one_f_one_b(16, 128)
    found = plan(schedule, noisy_times(schedule, seed=4), 0.8)
    assert len(schedule.actions) == 4096
    assert found.solver.optimality_gap < 1e-6


@pytest.mark.usefixtures("interior")
def test_out_of_time_is_a_solver_error():
    schedule = one_f_one_b(4, 8)
    with pytest.raises(SolverError, match="NOT_SOLVED: out of time"):
        plan(schedule, noisy_times(schedule, seed=5), 0.8, time_limit_s=1e-9)


@pytest.mark.usefixtures("interior")
def test_glop_takes_over_where_the_proof_is_weak(monkeypatch):
    monkeypatch.setattr(planner, "_WIDEST_GAP", -1.0)
    schedule = one_f_one_b(4, 8)
    found = plan(schedule, noisy_times(schedule, seed=6), 0.8)
    assert found.solver.name == "GLOP"
    assert found.solver.optimality_gap < 1e-6


@pytest.mark.usefixtures("interior")
def test_its_plan_stands_where_glop_fails_too(monkeypatch):
    def fail(*_: object) -> None:
        raise SolverError("GLOP ended ABNORMAL")

    monkeypatch.setattr(planner, "_WIDEST_GAP", -1.0)
    monkeypatch.setattr(planner, "solve_glop", fail)
    schedule = one_f_one_b(4, 8)
    found = plan(schedule, noisy_times(schedule, seed=7), 0.8)
    assert (found.solver.name, found.solver.status) == ("interior point", SolverStatus.FEASIBLE)
    assert found.solver.optimality_gap <= CLOSE
