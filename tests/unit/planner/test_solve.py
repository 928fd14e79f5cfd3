from __future__ import annotations

import json
import math

import numpy as np
import pytest
from problems import changed, plan_problem
from schedules import gpipe, one_f_one_b, split_gpipe, v_shape

from tf_adapters.errors import PlanInputError, ScheduleError, SolverError
from tf_adapters.planner import glop
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.planner.program import SolverStatus
from tf_adapters.planner.solve import plan, plan_from_json, solve
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

SERIAL = PipelineSchedule.from_text([["0F0", "0B0", "0F1", "0B1"]])


def act(text: str) -> Action:
    return Action.parse(text)


def times_of(schedule: PipelineSchedule, forward: float = 1.0, frozen: float = 1.0, full: float = 2.0):
    """F and I take ``forward``, B takes ``frozen`` to ``full``, W takes 0 to ``full - frozen``."""
    bounds = {
        Kind.FORWARD: Bounds(forward, forward),
        Kind.INPUT_GRAD: Bounds(frozen, frozen),
        Kind.BACKWARD: Bounds(frozen, full),
        Kind.WEIGHT_GRAD: Bounds(0.0, full - frozen),
    }
    return {action: bounds[action.kind] for action in schedule.actions}


def payload(**changes):
    data = {
        "ranks": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
        "times": {f"{s}F{m}": [12.0, 12.0] for s in range(2) for m in range(2)}
        | {f"{s}B{m}": [11.0, 24.5] for s in range(2) for m in range(2)},
        "communication": {"0F0->1F0": 0.4},
        "max_freeze_ratio": 0.8,
    }
    return data | changes


def test_a_problem_is_read_back_as_it_was_written():
    problem = PlanProblem.from_json(payload(overhead={"0F1": 0.5}, target_makespan_ms=60))
    assert problem.measurement.communication == {(act("0F0"), act("1F0")): 0.4}
    assert problem.measurement.times[act("0B0")] == Bounds(11.0, 24.5)
    assert PlanProblem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


def test_a_problem_of_pairs_and_numpys_numbers_becomes_one_of_floats():
    times = {action: (np.float32(1.0), 2) for action in SERIAL.actions}
    valid = plan_problem(SERIAL, times, 1).validate()
    assert valid.measurement.times[act("0B0")] == Bounds(1.0, 2.0)
    assert type(valid.limits.max_freeze_ratio) is type(valid.measurement.times[act("0B0")].lower) is float


def test_one_rank_freezes_up_to_its_budget():
    made = plan(SERIAL, times_of(SERIAL), 0.5)
    assert made.makespan_ms.unfrozen == 6.0
    assert made.makespan_ms.planned == pytest.approx(5.0)
    assert made.makespan_ms.fully_frozen == 4.0
    assert made.mean_freeze_ratio == pytest.approx(0.5)
    assert made.stage_freeze_ratio == {0: pytest.approx(0.5)}
    assert made.critical_path == SERIAL.actions
    assert made.solver.name == "GLOP"
    assert made.solver.status is SolverStatus.OPTIMAL
    assert 0.0 <= made.solver.optimality_gap < 1e-6


def test_freezing_is_spread_where_it_costs_nothing():
    made = plan(SERIAL, times_of(SERIAL), 0.5)
    assert list(made.freeze_ratio.values()) == pytest.approx([0.5, 0.5], abs=1e-6)


def test_nothing_is_frozen_where_it_does_not_end_the_batch_earlier():
    """Stage 1 takes ten times as long as stage 0: only stage 0's last backward is on the critical path."""
    schedule = one_f_one_b(2, 3)
    times = times_of(schedule)
    times |= {a: Bounds(10 * times[a].lower, 10 * times[a].upper) for a in schedule.actions if a.stage == 1}
    made = plan(schedule, times, 1.0)
    assert made.makespan_ms.planned == pytest.approx(1 + 3 * 20 + 1)
    assert {str(a): r for a, r in made.freeze_ratio.items() if r > 0} == {
        "0B2": 1.0, "1B0": 1.0, "1B1": 1.0, "1B2": 1.0
    }  # fmt: skip


def test_the_plan_is_consistent():
    schedule = gpipe(3, 4)
    made = plan(schedule, times_of(schedule), 0.6, communication=dict.fromkeys(schedule.transfers(), 0.1))
    assert set(made.start_ms) == set(made.duration_ms) == set(schedule.actions)
    assert set(made.freeze_ratio) == {a for a in schedule.actions if a.freezable}
    end = max(made.start_ms[a] + made.duration_ms[a] for a in schedule.actions)
    assert end == pytest.approx(made.makespan_ms.planned)
    for action, ratio in made.freeze_ratio.items():
        assert made.duration_ms[action] == pytest.approx(2.0 - ratio)
    last = made.critical_path[-1]
    assert made.start_ms[last] + made.duration_ms[last] == pytest.approx(end)
    assert made.start_ms[made.critical_path[0]] == 0.0


def test_weight_gradient_halves_are_what_a_split_backward_freezes():
    schedule = split_gpipe(2, 3)
    made = plan(schedule, times_of(schedule), 1.0)
    assert {action.kind for action in made.freeze_ratio} == {Kind.WEIGHT_GRAD}
    assert made.makespan_ms.planned == pytest.approx(made.makespan_ms.fully_frozen)


def test_two_stages_of_one_rank_have_two_budgets():
    schedule = v_shape(1, 2)
    made = plan(schedule, times_of(schedule), 0.25)
    assert made.stage_freeze_ratio == pytest.approx({0: 0.25, 1: 0.25})


def test_an_action_without_a_range_counts_in_the_budget():
    times = times_of(SERIAL) | {act("0B0"): Bounds(2.0, 2.0)}
    made = plan(SERIAL, times, 0.5)
    assert {str(a): r for a, r in made.freeze_ratio.items()} == {"0B0": 0.0, "0B1": pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("ratio", "frozen"), [(0.0, 1.0), (0.8, 2.0)], ids=["nothing may be frozen", "nothing can be gained"]
)
def test_no_solve_without_need(ratio, frozen):
    made = plan(SERIAL, times_of(SERIAL, frozen=frozen), ratio)
    assert made.solver.status is SolverStatus.NOT_NEEDED
    assert made.solver.optimality_gap == 0.0
    assert set(made.freeze_ratio.values()) == {0.0}
    assert made.makespan_ms.planned == made.makespan_ms.unfrozen


def test_all_times_zero():
    made = plan(SERIAL, dict.fromkeys(SERIAL.actions, (0.0, 0.0)), 0.8)
    assert made.makespan_ms.planned == 0.0
    assert made.solver.optimality_gap == 0.0


def test_a_forward_takes_its_longer_time():
    made = plan(SERIAL, times_of(SERIAL) | {act("0F0"): (0.5, 1.5)}, 0.0)
    assert made.duration_ms[act("0F0")] == 1.5
    assert made.makespan_ms.unfrozen == 6.5
    assert made.makespan_ms.fully_frozen == 4.5


@pytest.mark.parametrize("unit", [1e-3, 1e3, 7.3e-9, 2.1e30])
def test_the_unit_of_time_does_not_matter(unit):
    schedule = one_f_one_b(4, 8)
    times = times_of(schedule)
    scaled = {a: (b.lower * unit, b.upper * unit) for a, b in times.items()}
    one, other = plan(schedule, times, 0.7), plan(schedule, scaled, 0.7)
    assert list(other.freeze_ratio.values()) == pytest.approx(list(one.freeze_ratio.values()), abs=1e-6)
    assert other.makespan_ms.planned == pytest.approx(one.makespan_ms.planned * unit, rel=1e-9)


def test_a_plan_survives_json():
    schedule = gpipe(2, 3)
    made = plan(schedule, times_of(schedule), 0.5)
    data = json.loads(json.dumps(made.to_json()))
    assert FreezePlan.from_json(data) == made
    assert list(data) == [
        *("makespan_ms", "freeze_ratio", "start_ms", "duration_ms", "mean_freeze_ratio"),
        *("stage_freeze_ratio", "critical_path", "solver"),
    ]
    assert list(data["makespan_ms"]) == ["unfrozen", "planned", "fully_frozen"]
    assert list(data["solver"]) == ["name", "status", "seconds", "optimality_gap"]
    assert data["solver"]["status"] == "OPTIMAL"
    assert list(data["stage_freeze_ratio"]) == ["0", "1"]
    assert list(data["freeze_ratio"]) == ["0B0", "0B1", "0B2", "1B0", "1B1", "1B2"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("solver", {"name": "GLOP"}),
        ("critical_path", ["x"]),
        ("freeze_ratio", [1]),
        ("mean_freeze_ratio", "a"),
    ],
)
def test_a_broken_plan_names_its_field(field, value):
    data = plan(SERIAL, times_of(SERIAL), 0.5).to_json()
    with pytest.raises(PlanInputError, match=f"^{field}"):
        FreezePlan.from_json(data | {field: value})
    del data[field]
    with pytest.raises(PlanInputError, match=f"^{field}: missing$"):
        FreezePlan.from_json(data)


def test_python_and_json_give_one_plan():
    data = payload()
    schedule = PipelineSchedule.from_text(data["ranks"])
    made = plan(
        schedule,
        {act(text): tuple(pair) for text, pair in data["times"].items()},
        0.8,
        communication={(act("0F0"), act("1F0")): 0.4},
    )
    assert plan_from_json(data).freeze_ratio == made.freeze_ratio


def test_an_action_that_waits_for_anothers_end_is_planned_with():
    """Rank 0's first backward waits 50 ms from the end of rank 1's."""
    data = payload()
    schedule, times = PipelineSchedule.from_text(data["ranks"]), {act(t): tuple(p) for t, p in data["times"].items()}
    wait = (act("1B0"), act("0B0"))
    free = plan(schedule, times, 0.0)
    held = plan(schedule, times, 0.0, waits={wait: 50.0})
    assert held.start_ms[wait[1]] == pytest.approx(held.start_ms[wait[0]] + times[wait[0]][1] + 50.0)
    assert held.makespan_ms.planned > free.makespan_ms.planned
    problem = PlanProblem.from_json(payload(waits={"1B0->0B0": 50.0}))
    assert problem.measurement.waits == {wait: 50.0}
    assert PlanProblem.from_json(problem.to_json()) == problem
    assert "waits" not in PlanProblem.from_json(data).to_json()


def test_waits_hold_in_a_deferred_order_that_moves_no_forward_and_are_left_out_of_one_that_does():
    schedule = one_f_one_b(2, 6)
    waits = {(act("1F1"), act("0F3")): 9.0}  # rank 0's fourth forward waits for rank 1's second
    times = {a: (10.0, 10.0) if a.kind is Kind.FORWARD else (10.0, 20.0) for a in schedule.actions}
    problem = plan_problem(schedule, times, 0.0, waits=waits, defer=True, moves_forwards=False)
    kept = solve(problem)
    assert kept.start_ms[act("0F3")] >= kept.start_ms[act("1F1")] + 19.0
    moved = solve(changed(problem, moves_forwards=True, extra_microbatches=4))
    assert moved.makespan_ms.planned <= kept.makespan_ms.planned
    assert moved.schedule.validate()


def changed_times(**changes):
    return {"times": payload()["times"] | changes}


def without(key, **data):
    return {name: value for name, value in payload(**data).items() if name != key}


WRONG = {
    "no object": ([1], "the input is [1]"),
    "unknown field": (payload(max_freeze_ration=1), "'max_freeze_ration' (did you mean 'max_freeze_ratio'?)"),
    "no ranks": (without("ranks"), "ranks: missing"),
    "no times": (without("times"), "times: missing"),
    "no ratio": (without("max_freeze_ratio"), "max_freeze_ratio: missing"),
    "ranks no lists": (payload(ranks="0F0"), "ranks: '0F0' is not one list"),
    "bad rank action": (payload(ranks=[["0F0", "0Z0"]]), "ranks[0][1]: '0Z0' is not an action"),
    "action no text": (payload(ranks=[["0F0", 7]]), "ranks[0][1]: 7 is not an action"),
    "no actions": (payload(ranks=[]), "ranks: the schedule has no actions"),
    "deadlock": (
        payload(ranks=[["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]),
        "ranks: the schedule deadlocks: 0B0 waits for 1B0",
    ),
    "twice": (payload(ranks=[["0F0", "0B0", "0B0"]]), "ranks: 0B0 is listed twice"),
    "times no object": (payload(times=[1]), "times: [1] is not an object"),
    "bad time action": (payload(**changed_times(x=[1, 2])), "times: 'x' is not an action"),
    "strange action": (
        payload(**changed_times(**{"5B0": [1, 2]})),
        "times: '5B0' is not an action of the schedule",
    ),
    "time missing": (payload(times={"0F0": [1, 1]}), "times: '0F1' is missing"),
    "one time": (payload(**changed_times(**{"0B0": [1]})), "times['0B0']: [1] is not [all frozen"),
    "time no list": (payload(**changed_times(**{"0B0": 3})), "times['0B0']: 3 is not [all frozen"),
    "time null": (payload(**changed_times(**{"0B0": None})), "times['0B0']: None is not [all frozen"),
    "time text": (payload(**changed_times(**{"0B0": [1, "2"]})), "times['0B0'][1]: '2' is not a finite time"),
    "time bool": (
        payload(**changed_times(**{"0B0": [True, 2]})),
        "times['0B0'][0]: True is not a finite time",
    ),
    "time nan": (payload(**changed_times(**{"0B0": [math.nan, 2]})), "times['0B0'][0]: nan is not a finite"),
    "time inf": (payload(**changed_times(**{"0B0": [1, math.inf]})), "times['0B0'][1]: inf is not a finite"),
    "time huge": (payload(**changed_times(**{"0B0": [1, 10**400]})), "times['0B0'][1]: 1000"),
    "time negative": (payload(**changed_times(**{"0B0": [-1, 2]})), "times['0B0'][0]: -1 is not a finite"),
    "min above max": (payload(**changed_times(**{"0B0": [3, 2]})), "times['0B0']: all frozen takes 3 ms"),
    "forward min above max": (
        payload(**changed_times(**{"0F0": [3, 2]})),
        "times['0F0']: all frozen takes 3",
    ),
    "sum too large": (
        payload(**changed_times(**{"0B0": [1, 1.5e308], "0B1": [1, 1.5e308]})),
        "times: they add",
    ),
    "ratio above": (payload(max_freeze_ratio=1.01), "max_freeze_ratio: 1.01 is not a number from 0 to 1"),
    "ratio below": (payload(max_freeze_ratio=-0.1), "max_freeze_ratio: -0.1"),
    "ratio bool": (payload(max_freeze_ratio=True), "max_freeze_ratio: True"),
    "ratio nan": (payload(max_freeze_ratio=math.nan), "max_freeze_ratio: nan"),
    "ratio text": (payload(max_freeze_ratio="0.8"), "max_freeze_ratio: '0.8'"),
    "communication no object": (payload(communication=[]), "communication: [] is not an object"),
    "no edge text": (payload(communication={"0F0": 1}), "communication: '0F0' is not an edge such as"),
    "edge of no action": (
        payload(communication={"0F0->x": 1}),
        "communication: '0F0->x' is not an edge",
    ),
    "edge no text": (payload(communication={1: 1}), "communication: 1 is not an edge such as"),
    "edge within a stage": (
        payload(communication={"0F0->0F1": 1}),
        "communication: '0F0->0F1' is not an edge",
    ),
    "edge backwards": (payload(communication={"1F0->0F0": 1}), "communication: '1F0->0F0' is not an edge"),
    "communication negative": (payload(communication={"0F0->1F0": -1}), "communication['0F0->1F0']: -1"),
    "wait no edge text": (payload(waits={"0F0": 1}), "waits: '0F0' is not an edge such as"),
    "wait unknown": (payload(waits={"0F0->7B7": 1}), "waits: '7B7' is not an action of the schedule"),
    "wait negative": (payload(waits={"1B0->0B1": -1}), "waits['1B0->0B1']: -1"),
    "communication nan": (payload(communication={"0F0->1F0": math.nan}), "communication['0F0->1F0']: nan"),
}


@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_refused_in_one_line_that_names_the_field(data, message):
    with pytest.raises(PlanInputError) as caught:
        plan_from_json(data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 320


def test_python_callers_get_a_schedule_error_for_a_schedule():
    with pytest.raises(ScheduleError, match="0B0 comes before 0F0"):
        plan(PipelineSchedule.from_text([["0B0", "0F0"]]), {}, 0.5)


@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
def test_a_time_limit_is_above_zero(limit):
    with pytest.raises(PlanInputError, match="time_limit_s"):
        plan(SERIAL, times_of(SERIAL), 0.5, time_limit_s=limit)


def test_out_of_time_is_a_solver_error():
    with pytest.raises(SolverError, match="NOT_SOLVED while looking for the earliest end of the batch"):
        plan(SERIAL, times_of(SERIAL), 0.5, time_limit_s=1e-12)


@pytest.mark.parametrize("status", [s for s in glop.SolverStatus if s.value not in ("OPTIMAL", "NOT_NEEDED")])
def test_no_value_of_a_failed_solve_is_used(status, monkeypatch):
    monkeypatch.setattr(glop._Model, "_run", lambda *_: status)
    monkeypatch.setattr(glop._Model, "_read", lambda _: pytest.fail("read a failed solve"))
    with pytest.raises(SolverError, match=f"GLOP ended {status.value} "):
        plan(SERIAL, times_of(SERIAL), 0.5)


def test_an_abnormal_end_is_tried_again_from_the_start(monkeypatch):
    tried = []
    real = glop._Model._run

    def run(self, parameters, purpose):
        tried.append(parameters)
        status = real(self, parameters, purpose)
        return status if parameters == glop._GLOP_AGAIN else SolverStatus.ABNORMAL

    monkeypatch.setattr(glop._Model, "_run", run)
    assert plan(SERIAL, times_of(SERIAL), 0.5).makespan_ms.planned == pytest.approx(5.0)
    assert tried == [glop._GLOP_FIRST, *[glop._GLOP_AGAIN, glop._GLOP_NEXT] * 2, glop._GLOP_AGAIN]


def test_the_plan_stands_when_only_the_spreading_fails(monkeypatch):
    real = glop._Model._run

    def run(self, parameters, purpose):
        return SolverStatus.ABNORMAL if purpose == "even freezing" else real(self, parameters, purpose)

    monkeypatch.setattr(glop._Model, "_run", run)
    made = plan(SERIAL, times_of(SERIAL), 0.5)
    assert made.makespan_ms.planned == pytest.approx(5.0)
    assert made.mean_freeze_ratio == pytest.approx(0.5)


def test_a_target_is_reached_with_the_least_freezing():
    schedule = gpipe(3, 6)
    times = times_of(schedule)
    fastest = plan(schedule, times, 0.8)
    unfrozen = fastest.makespan_ms.unfrozen
    frozen = 0.0
    for share in (1.2, 1.0, 0.95, 0.9, 0.85):
        found = plan(schedule, times, 0.8, target_makespan_ms=share * unfrozen)
        assert found.makespan_ms.planned == pytest.approx(min(1.0, share) * unfrozen)
        assert found.solver.optimality_gap < 1e-6
        assert found.mean_freeze_ratio >= frozen
        frozen = found.mean_freeze_ratio
    assert 0.0 < frozen < fastest.mean_freeze_ratio


def test_a_target_out_of_reach_is_the_fastest_plan():
    schedule = gpipe(3, 6)
    fastest = plan(schedule, times_of(schedule), 0.8)
    asked = plan(schedule, times_of(schedule), 0.8, target_makespan_ms=0.1 * fastest.makespan_ms.planned)
    assert asked.freeze_ratio == pytest.approx(fastest.freeze_ratio)


@pytest.mark.parametrize("target", [-1.0, float("nan"), "soon", None])
def test_a_target_is_a_time(target):
    with pytest.raises(PlanInputError, match=r"^target_makespan_ms: .* is not a finite time in ms"):
        plan(SERIAL, times_of(SERIAL), 0.5, target_makespan_ms=target)


def test_a_large_schedule():
    schedule = gpipe(8, 128)
    made = plan(schedule, times_of(schedule), 0.5)
    assert made.solver.optimality_gap < 1e-6
    assert max(made.stage_freeze_ratio.values()) <= 0.5 + 1e-9


@pytest.mark.parametrize(
    ("order", "stages", "microbatches", "seed"), [(one_f_one_b, 4, 64, 2), (one_f_one_b, 8, 128, 0), (gpipe, 8, 64, 2)]
)
def test_times_as_they_are_measured_are_planned_for(order, stages, microbatches, seed):
    """Of large programs whose times all differ, GLOP took the end that it had found itself for infeasible."""
    schedule = order(stages, microbatches)
    rng = np.random.default_rng(seed)
    pace = {stage: 1 + 0.05 * rng.standard_normal() for stage in range(100)}
    noise = {action: pace[action.stage] * (1 + 0.03 * rng.standard_normal()) for action in schedule.actions}
    times = {a: (2 * n - 1, 2 * n) if a.freezable else (n, n) for a, n in noise.items()}
    made = plan(schedule, times, 0.8)
    assert made.solver.status is SolverStatus.OPTIMAL
    assert made.solver.optimality_gap < 1e-6
    assert made.mean_freeze_ratio < 0.8


def test_a_solve_that_goes_round_in_circles_ends(monkeypatch):
    """The simplex method may cycle; that must not hold training up."""
    monkeypatch.setattr(glop, "_ITERATIONS", 3)
    monkeypatch.setattr(glop, "_ITERATIONS_PER_ACTION", 0)
    schedule = gpipe(4, 16)
    with pytest.raises(SolverError, match=r"GLOP ended [A-Z_]+ while looking for the earliest end of the batch"):
        plan(schedule, times_of(schedule), 0.5)
