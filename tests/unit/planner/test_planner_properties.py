"""The planner against another solver (HiGHS) on the paper's own variables, and against networkx."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import gpipe, one_f_one_b, split_gpipe, split_one_f_one_b
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from tf_adapters.planner.solve import plan
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

PROPERTY = settings(max_examples=100)


class Case(NamedTuple):
    schedule: PipelineSchedule
    times: dict[Action, tuple[float, float]]
    ratio: float
    communication: dict[tuple[Action, Action], float]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    make = draw(st.sampled_from([gpipe, one_f_one_b, split_gpipe, split_one_f_one_b]))
    schedule = make(draw(st.integers(1, 6)), draw(st.integers(1, 10)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    noise = draw(st.sampled_from([0.0, 0.02, 0.5]))
    rigid = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    times = {}
    for action in schedule.actions:
        upper = 10.0 * random.uniform(1.0 - noise, 1.0 + noise)
        frozen = action.freezable and random.uniform() >= rigid
        times[action] = (upper * random.uniform(0.1, 0.8) if frozen else upper, upper)
    talks = draw(st.booleans())
    communication = {edge: random.uniform(0.0, 3.0) for edge in schedule.transfers()} if talks else {}
    ratio = draw(st.sampled_from([0.0, 0.05, 0.5, 0.8, 1.0]) | st.floats(0.0, 1.0))
    return Case(schedule, times, ratio, communication)


def paper_edges(case: Case) -> dict[tuple[Action, Action], float]:
    """All edges of the paper's appendix, the redundant ones within a stage too, straight from the ranks."""
    actions = set(case.schedule.actions)
    edges: dict[tuple[Action, Action], float] = {}

    def add(source: Action, target: Action) -> None:
        if source in actions and target in actions:
            edges[source, target] = case.communication.get((source, target), 0.0)

    for rank in case.schedule.ranks:
        for source, target in pairwise(rank):
            add(source, target)
    gradients = (Kind.BACKWARD, Kind.INPUT_GRAD)
    for action in actions:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        add(action, Action(stage, kind, microbatch + 1))
        if kind is Kind.FORWARD:
            add(action, Action(stage + 1, kind, microbatch))
            for after in (*gradients, Kind.WEIGHT_GRAD):
                add(action, Action(stage, after, microbatch))
        elif kind in gradients:
            add(action, Action(stage, Kind.WEIGHT_GRAD, microbatch))
            for other in gradients:
                add(action, Action(stage - 1, other, microbatch))
    return edges


class Reference(NamedTuple):
    makespan: float
    freezing: float


def highs(case: Case, planned: float) -> Reference:
    """The paper's program in start times P and durations w (ms): the makespan, then freezing at ``planned``.

    The least freezing changes some thousand times as fast as the makespan that it has to keep, so two solvers
    can only be compared at one makespan.
    """
    actions = list(case.schedule.actions)
    place = {action: k for k, action in enumerate(actions)}
    n = len(actions)
    start, length, end = (lambda a: place[a]), (lambda a: n + place[a]), 2 * n
    triples: list[tuple[int, int, float]] = []
    limits: list[float] = []

    def at_most(terms: dict[int, float], limit: float) -> None:
        triples.extend((len(limits), column, value) for column, value in terms.items())
        limits.append(limit)

    for (source, target), delay in paper_edges(case).items():
        at_most({start(source): 1.0, length(source): 1.0, start(target): -1.0}, -delay)
    for action in actions:
        at_most({start(action): 1.0, length(action): 1.0, end: -1.0}, 0.0)
    delta = {a: 1.0 / (high - low) for a, (low, high) in case.times.items() if high > low}
    for stage in range(case.schedule.num_stages):
        freezable = [a for a in actions if a.stage == stage and a.freezable]
        ranged = [a for a in freezable if a in delta]
        terms = {length(a): -delta[a] for a in ranged}
        at_most(terms, case.ratio * len(freezable) - sum(delta[a] * case.times[a][1] for a in ranged))
    bounds = [(0.0, None)] * n + [case.times[a] for a in actions] + [(0.0, None)]

    def minimise(cost: np.ndarray) -> float:
        row, column, value = zip(*triples, strict=True)
        matrix = coo_matrix((value, (row, column)), shape=(len(limits), 2 * n + 1)).tocsr()
        options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
        found = linprog(cost, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs", options=options)
        assert found.status == 0, found.message
        return float(found.fun)

    cost = np.zeros(2 * n + 1)
    cost[end] = 1.0
    makespan = minimise(cost)
    bounds[end] = (0.0, max(makespan, planned))
    cost[end] = 0.0
    for action, inverse in delta.items():
        cost[length(action)] = -inverse
    freezing = minimise(cost) + sum(inverse * case.times[a][1] for a, inverse in delta.items())
    return Reference(makespan, freezing)


@PROPERTY
@given(cases())
def test_the_optimum_is_the_one_that_highs_finds(case):
    made = plan(*case)
    reference = highs(case, made.makespan_ms.planned)
    assert made.makespan_ms.planned == pytest.approx(reference.makespan, rel=1e-6)
    assert sum(made.freeze_ratio.values()) == pytest.approx(reference.freezing, rel=1e-6, abs=1e-6)
    bound = made.makespan_ms.planned * (1.0 - made.solver.optimality_gap)
    assert bound <= reference.makespan * (1.0 + 1e-9)
    assert 0.0 <= made.solver.optimality_gap < 1e-6


@PROPERTY
@given(cases())
def test_budgets_and_bounds_hold(case):
    made = plan(*case)
    for stage in range(case.schedule.num_stages):
        ratios = [r for a, r in made.freeze_ratio.items() if a.stage == stage]
        assert sum(ratios) <= case.ratio * len(ratios) + 1e-8
        assert made.stage_freeze_ratio[stage] == pytest.approx(np.mean(ratios))
    for action, (low, high) in case.times.items():
        assert low * (1 - 1e-12) <= made.duration_ms[action] <= high
        assert 0.0 <= made.freeze_ratio.get(action, 0.0) <= 1.0
        assert high > low or made.freeze_ratio.get(action, 0.0) == 0.0
    times = made.makespan_ms
    assert times.fully_frozen <= times.planned * (1 + 1e-12) <= times.unfrozen * (1 + 2e-12)


@PROPERTY
@given(cases())
def test_makespans_are_longest_paths(case):
    made, dag = plan(*case), PipelineDag.from_schedule(case.schedule, case.communication)
    for durations, makespan in (
        (dict(made.duration_ms), made.makespan_ms.planned),
        ({action: high for action, (_, high) in case.times.items()}, made.makespan_ms.unfrozen),
        ({action: low for action, (low, _) in case.times.items()}, made.makespan_ms.fully_frozen),
    ):
        graph = networkx.DiGraph()
        for action in case.schedule.actions:
            graph.add_edge((action, "start"), (action, "end"), weight=durations[action])
        for (source, target), delay in paper_edges(case).items():
            graph.add_edge((source, "end"), (target, "start"), weight=delay)
        longest = networkx.dag_longest_path_length(graph)
        assert dag.makespan(durations) == pytest.approx(longest, rel=1e-12)
        assert makespan == pytest.approx(longest, rel=1e-12)


@PROPERTY
@given(cases(), st.sampled_from([1e-3, 1e3, 0.37]))
def test_the_unit_of_time_does_not_matter(case, unit):
    scaled = case._replace(
        times={action: (low * unit, high * unit) for action, (low, high) in case.times.items()},
        communication={edge: delay * unit for edge, delay in case.communication.items()},
    )
    one, other = plan(*case), plan(*scaled)
    assert list(other.freeze_ratio.values()) == pytest.approx(list(one.freeze_ratio.values()), abs=1e-6)
    assert other.makespan_ms.planned == pytest.approx(one.makespan_ms.planned * unit, rel=1e-9)


@PROPERTY
@given(cases(), st.floats(0.0, 1.0))
def test_a_larger_budget_never_ends_the_batch_later(case, ratio):
    small, large = sorted((case.ratio, ratio))
    later = plan(*case._replace(ratio=small)).makespan_ms.planned
    assert plan(*case._replace(ratio=large)).makespan_ms.planned <= later * (1 + 2e-9)
