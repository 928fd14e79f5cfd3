"""Rewritten orders and the plans over them: valid, within memory, never slower, and as good as published bounds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import changed, plan_problem

from tf_adapters.cli import main
from tf_adapters.errors import PlanInputError
from tf_adapters.planner.deferred import describe_deferral
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.deferral import DeferralTimes, backward_of, defer, most_held, most_in_flight, split
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.orders import NAMES, named_schedule, one_forward_one_backward, v_with_whole_backwards

EQUAL = {Kind.FORWARD: Bounds(1.0, 1.0), Kind.BACKWARD: Bounds(1.2, 2.2)}


def problem(stages: int, microbatches: int, max_freeze_ratio: float = 0.0, **more: object) -> PlanProblem:
    """Equal stages, forward : input gradient : weight gradient = 1 : 1.2 : 1."""
    schedule = one_forward_one_backward(stages, microbatches)
    times = {action: EQUAL[action.kind] for action in schedule.actions}
    return plan_problem(schedule, times, max_freeze_ratio=max_freeze_ratio, **{"defer": True, **more})


def speedup(plan: FreezePlan) -> float:
    assert plan.makespan_ms.host is not None
    return plan.makespan_ms.host / plan.makespan_ms.planned


def order_of_weights(row: tuple[Action, ...], stage: int) -> list[int]:
    return [action.microbatch for action in row if action.stage == stage and action.freezable]


@given(
    name=st.sampled_from(sorted(NAMES)),
    ranks=st.integers(2, 5),
    microbatches=st.integers(2, 4),
    extra=st.integers(0, 4),
    moves=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150)
def test_orders_are_valid_within_memory_and_never_slower(name, ranks, microbatches, extra, moves, seed):
    host = named_schedule(name, ranks, microbatches * ranks)
    parts, rng = split(host), np.random.default_rng(seed)
    durations = {action: float(rng.uniform(0.0, 3.0)) for action in parts.actions}
    communication = {edge: float(rng.uniform(0.0, 0.5)) for edge in parts.transfers()}
    order = defer(host, DeferralTimes(durations, communication, {}), extra_microbatches=extra, moves_forwards=moves)
    order.validate()
    assert sorted(map(str, order.actions)) == sorted(map(str, parts.actions))
    assert most_in_flight(order) <= most_in_flight(parts) + extra

    def end(schedule: PipelineSchedule) -> float:
        return PipelineDag.from_schedule(schedule, communication).makespan(durations)

    assert end(order) <= end(parts) * (1 + 1e-9)
    for rank, row in enumerate(order.ranks):
        if not moves:
            assert [a for a in row if not a.freezable] == [a for a in parts.ranks[rank] if not a.freezable]
        for stage in order.stages_of(rank):
            input_grads = [a.microbatch for a in row if a.stage == stage and a.kind is Kind.INPUT_GRAD]
            assert order_of_weights(row, stage) == input_grads == order_of_weights(host.ranks[rank], stage)


@given(
    name=st.sampled_from(sorted(NAMES)),
    ranks=st.integers(2, 5),
    fitting=st.lists(st.integers(0, 12), min_size=5, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_each_rank_stays_within_what_fits(name, ranks, fitting, seed):
    host = named_schedule(name, ranks, 2 * ranks)
    parts, rng = split(host), np.random.default_rng(seed)
    durations = {action: float(rng.uniform(0.1, 3.0)) for action in parts.actions}
    times = DeferralTimes(durations, {}, {})
    of_rank = dict(enumerate(fitting[:ranks]))
    order = defer(host, times, fitting=of_rank)
    if order is None:
        assert not all(most_held(row) <= of_rank[rank] for rank, row in enumerate(host.ranks))
        return
    order.validate()
    assert sorted(map(str, order.actions)) == sorted(map(str, parts.actions))
    for rank, row in enumerate(order.ranks):
        assert most_held(row) <= of_rank[rank]
    if all(most_held(row) <= of_rank[rank] for rank, row in enumerate(host.ranks)):
        assert times.span_ms(order) <= times.span_ms(parts) * (1 + 1e-9)


@given(
    name=st.sampled_from(sorted(set(NAMES) - {"looped_bfs"})),
    ranks=st.integers(2, 5),
    rounds=st.integers(2, 3),
    fewer=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80)
def test_an_order_for_less_memory_runs_everything_and_never_deadlocks(name, ranks, rounds, fewer, seed):
    """It exists down to one microbatch of each stage of a rank. Gradients of a stage keep the order of their sums."""
    host = named_schedule(name, ranks, rounds * ranks)
    parts, rng = split(host), np.random.default_rng(seed)
    durations = {action: float(rng.uniform(0.0, 3.0)) for action in parts.actions}
    communication = {edge: float(rng.uniform(0.0, 0.5)) for edge in parts.transfers()}
    limit = most_in_flight(host) - fewer
    order = defer(host, DeferralTimes(durations, communication, {}), extra_microbatches=-fewer)
    assert (order is not None) == (limit >= host.num_stages // ranks)
    if order is None:
        return
    order.validate()
    assert sorted(map(str, order.actions)) == sorted(map(str, parts.actions))
    assert most_in_flight(order) <= limit
    for rank, row in enumerate(order.ranks):
        for stage in order.stages_of(rank):
            for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
                in_order = [a for a in row if (a.stage, a.kind) == (stage, kind)]
                assert in_order == [a for a in parts.ranks[rank] if (a.stage, a.kind) == (stage, kind)]


def test_half_of_a_vs_memory_is_still_faster_than_1f1b():
    """With a V, 16 microbatches of one of two stages are the memory of 8 whole ones. Equal stages on 8 ranks."""
    whole = one_forward_one_backward(8, 16)
    in_v = v_with_whole_backwards(8, 16)
    bounds = {Kind.FORWARD: Bounds(5.0, 5.0), Kind.BACKWARD: Bounds(5.0, 10.0)}
    times = {action: bounds[action.kind] for action in in_v.actions}
    half = solve(plan_problem(in_v, times, 0.0, defer=True, extra_microbatches=-8))
    assert most_in_flight(half.schedule) == 8
    of_1f1b = {action: Bounds(2 * b.upper, 2 * b.upper) for action in whole.actions for b in [bounds[action.kind]]}
    assert half.makespan_ms.planned < solve(plan_problem(whole, of_1f1b, 0.0)).makespan_ms.planned


def test_stages_that_share_a_weight_keep_their_order():
    """Then memory cannot fall as low, and the least that an order needs is named."""
    in_v = v_with_whole_backwards(2, 6)
    times = {a: Bounds(1.0, 2.0) if a.freezable else Bounds(1.0, 1.0) for a in in_v.actions}
    tight = plan_problem(in_v, times, 0.0, defer=True, extra_microbatches=-2)
    assert most_in_flight(solve(tight).schedule) == 2
    with pytest.raises(PlanInputError, match=r"^extra_microbatches: -2: .*; allowed is at least 0$"):
        solve(changed(tight, moves_stages=False))
    with pytest.raises(PlanInputError, match=r"; allowed is at least 0$"):
        solve(changed(tight, moves_forwards=False))


def test_memory_that_is_free_becomes_speed():
    """What fits is used where it helps, on the ranks that have it; where nothing is known nothing changes."""

    def planned(**fitting: int) -> FreezePlan:
        of_rank = {int(rank[1:]): count for rank, count in fitting.items()}
        return solve(problem(4, 8, fills_memory=True, fitting_microbatches=of_rank))

    unknown, twice = planned(), planned(r0=8, r1=8, r2=8, r3=8)
    assert unknown.schedule == solve(problem(4, 8)).schedule
    assert twice.makespan_ms.planned == solve(problem(4, 8, extra_microbatches=4)).makespan_ms.planned
    plenty = planned(r0=99, r1=99, r2=99, r3=99)
    assert plenty.makespan_ms.planned <= twice.makespan_ms.planned
    full = planned(r0=8, r1=4, r2=3, r3=2)
    assert full.schedule is not None
    assert [most_held(row) <= limit for row, limit in zip(full.schedule.ranks, (8, 4, 3, 2), strict=True)] == [True] * 4
    tight = planned(r0=3, r1=3, r2=2, r3=1)
    assert tight.schedule is not None
    assert [most_held(row) for row in tight.schedule.ranks] == [3, 3, 2, 1]
    assert tight.makespan_ms.planned > twice.makespan_ms.planned
    with pytest.raises(PlanInputError, match=r"^fitting_microbatches: .*; 1 more on each rank would be enough$"):
        planned(r0=0, r1=0, r2=0, r3=0)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 16), (6, 24)])
def test_equal_stages_reach_the_published_bounds(stages, microbatches):
    """Qi et al. 2024: M(f+b+w) + (S-1)(f+b-w) at the fullest rank's memory, no bubble but the first fill at twice."""
    exact = solve(problem(stages, microbatches)).makespan_ms.planned
    assert exact == pytest.approx(microbatches * 3.2 + (stages - 1) * 1.2)
    twice = solve(problem(stages, microbatches, extra_microbatches=stages)).makespan_ms.planned
    assert microbatches * 3.2 + (stages - 1) <= twice + 1e-9
    assert twice < exact


@pytest.mark.parametrize(
    ("stages", "microbatches", "extra", "at_least", "frozen"), [(4, 8, 4, 1.23, 0.24), (8, 16, 8, 1.26, 0.16)]
)
def test_todays_speed_at_a_fraction_of_the_freezing(stages, microbatches, extra, at_least, frozen):
    today = solve(problem(stages, microbatches, 0.8, defer=False)).makespan_ms
    assert speedup(solve(problem(stages, microbatches, extra_microbatches=extra))) >= at_least
    plan = solve(problem(stages, microbatches, 0.8, extra_microbatches=extra, target_makespan_ms=today.planned))
    assert plan.makespan_ms.planned <= today.planned * (1 + 1e-6)
    assert plan.mean_freeze_ratio <= frozen


def test_no_order_of_a_small_pipeline_ends_earlier():
    """Against the exact optimum (CP-SAT) at the host's memory and at twice that."""
    for extra in (0, 2):
        found = solve(problem(2, 4, extra_microbatches=extra))
        assert found.makespan_ms.planned <= optimum(problem(2, 4), extra) * 1.02 + 1e-9


def optimum(of: PlanProblem, extra: int) -> float:
    """The shortest makespan of any order of F, I and W that holds no more than the limit, found by CP-SAT."""
    from ortools.sat.python import cp_model

    parts, limit, scale = split(of.measurement.schedule), most_in_flight(of.measurement.schedule) + extra, 10
    length = {Kind.FORWARD: 10, Kind.INPUT_GRAD: 12, Kind.WEIGHT_GRAD: 10}
    model = cp_model.CpModel()
    horizon = sum(length[action.kind] for action in parts.actions)
    start = {action: model.new_int_var(0, horizon, str(action)) for action in parts.actions}
    finish = {action: start[action] + length[action.kind] for action in parts.actions}
    for source, target in parts.transfers():
        model.add(start[target] >= finish[source])
    for row in parts.ranks:
        model.add_no_overlap([model.new_fixed_size_interval_var(start[a], length[a.kind], str(a)) for a in row])
        for action in row:
            if action.kind is Kind.FORWARD:
                input_grad, weight = (
                    Action(action.stage, kind, action.microbatch) for kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
                )
                model.add(start[input_grad] >= finish[action])
                model.add(start[weight] >= finish[input_grad])
        held = [
            model.new_interval_var(start[a], model.new_int_var(0, horizon, f"of {a}"), finish[w], f"held {a}")
            for a in row
            if a.kind is Kind.FORWARD
            for w in [Action(a.stage, Kind.WEIGHT_GRAD, a.microbatch)]
        ]
        model.add_cumulative(held, [1] * len(held), limit)
    end = model.new_int_var(0, horizon, "end")
    model.add_max_equality(end, list(finish.values()))
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = 20.0, 1
    assert solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return solver.best_objective_bound / scale


def test_the_hosts_order_stays_where_deferring_gains_nothing():
    schedule = PipelineSchedule.from_text([["0F0", "0B0", "0F1", "0B1"]])
    times = dict.fromkeys(schedule.actions, Bounds(1.0, 2.0))
    plan = solve(plan_problem(schedule, times, max_freeze_ratio=0.0, defer=True))
    assert plan.schedule == schedule
    assert plan.makespan_ms.host == plan.makespan_ms.planned


def test_a_plan_survives_json():
    plan = solve(problem(4, 8, 0.5, extra_microbatches=2))
    assert FreezePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    of = problem(4, 8, 0.5, extra_microbatches=2, moves_forwards=False)
    assert PlanProblem.from_json(json.loads(json.dumps(of.to_json()))) == of.validate()


def test_the_command_takes_the_same_input_and_gives_the_order(tmp_path, capsys):
    of = problem(4, 8, 0.8)
    data = {k: v for k, v in of.to_json().items() if k in ("ranks", "times", "max_freeze_ratio")}
    path = tmp_path / "input.json"
    path.write_text(json.dumps(data))
    assert main(["plan", str(path), "--defer", "--extra-microbatches", "4"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["makespan_ms"]["planned"] <= plan["makespan_ms"]["unfrozen"] < plan["makespan_ms"]["host"]
    order = PipelineSchedule.from_text(plan["ranks"]).validate()
    assert {backward_of(action) for action in order.actions} == set(of.measurement.schedule.actions)
    assert plan["freeze_ratio"].keys() == {str(action) for action in order.actions if action.freezable}
    assert plan["start_ms"].keys() == plan["duration_ms"].keys() == {str(action) for action in order.actions}
    assert main(["plan", str(path)]) == 0
    in_place = json.loads(capsys.readouterr().out)
    assert "ranks" not in in_place
    assert "host" not in in_place["makespan_ms"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--extra-microbatches", "2"], "needs --defer"),
        (
            ["--defer", "--extra-microbatches", "-2"],
            "holds so few microbatches; allowed is at least -1",
        ),
        (["--defer", "--extra-microbatches", "1.5"], "'1.5' is not an integer"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, capsys, options, words):
    path = tmp_path / "input.json"
    path.write_text(json.dumps(problem(2, 2).to_json()))
    try:
        status = main(["plan", str(path), *options])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_plan_says_what_can_wait_and_what_it_holds():
    schedule = one_forward_one_backward(2, 4)
    times = {a: Bounds(10.0, 10.0 if a.kind is Kind.FORWARD else 20.0 + 20.0 * a.stage) for a in schedule.actions}
    plan = solve(plan_problem(schedule, times, max_freeze_ratio=0.0, defer=True))
    assert plan.deferrable_share == pytest.approx({0: 0.5, 1: 0.75})
    assert FreezePlan.from_json(json.loads(json.dumps(plan.to_json()))).deferrable_share == plan.deferrable_share
    line = describe_deferral(plan, schedule)
    assert "50% to 75% of a stage's backwards" in line
    assert f"a rank holds {most_in_flight(plan.schedule)} microbatches at most, in the host's order 2" in line
    in_place = solve(plan_problem(schedule, times, max_freeze_ratio=0.0))
    assert "deferrable_share" not in in_place.to_json()
