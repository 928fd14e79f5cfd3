"""The planner's linear program, solved by GLOP.

Paper, section "Linear Programming Formulation". Durations are w_i = upper_i - r_i * range_i. The variables are then the
start times P_i, the freeze ratios r_i and the batch's end P_d. If steps overlap, the period takes the place of P_d, and
the start times of the ranks are free to shift (``schedule.period``).
The paper's weighted objective becomes three solves in order of importance, so that no weight has to be small enough:

1. the earliest end of the batch, or the shortest period;
2. the least total freezing that keeps it;
3. among those, the most even freezing (the least piecewise linear sum of r squared). Without this solve, the
   solution is a vertex: it freezes all of one action and nothing of the next, although a part of both would do.
   A limit on each stage's largest ratio would not help, because in most schedules every optimum fully freezes
   some action near the start or the end of the batch.

Where ratios are met by sampling tokens, one solve replaces the second and the third: it finds the least noise, which is
convex in each ratio.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tf_adapters.errors import SolverError
from tf_adapters.planner.program import Corners, Floats, Flow, FreezeProgram, Optimum, SolverStatus
from tf_adapters.schedule.dag import Edges

_SLACKS = (1e-11, 1e-9, 1e-8, 1e-7)
"""Relative slacks, tried in turn. By this much, a solve may worsen a result of the earlier solves, such as the span.
In large programs whose times all differ, GLOP's own tolerance can make the first slack infeasible."""

_SPAN_TOLERANCE = 1e-9
_FREEZING_SLACK = 1e-8
_SEGMENTS = 4
_ITERATIONS, _ITERATIONS_PER_ACTION = 2_000, 10
"""A solve may take the sum: the simplex method can cycle. Solves that ended took up to 7 iterations per action."""

# The presolve is off because it discards the basis that the next solve starts from, which is primal feasible for the
# next objective. The first solve has no such basis; there the dual simplex is several times faster.
_GLOP_FIRST = "use_preprocessing:false use_dual_simplex:true"
_GLOP_NEXT = "use_preprocessing:false use_dual_simplex:false"
_GLOP_AGAIN = "use_preprocessing:true use_dual_simplex:true"


def solve_glop(program: FreezeProgram, time_limit_s: float | None = None, target: float = 0.0) -> Optimum:
    """Solve the program. Its unit of time should be near a typical duration: GLOP's tolerances are absolute.

    A batch that ends by ``target`` is early enough: nothing is frozen to end it earlier.

    Raises SolverError with GLOP's status when one of the first two solves does not end OPTIMAL. The third
    only breaks ties: when it fails, the second's solution is returned.
    """
    model = _Model(program, time_limit_s)
    flow = model.minimise_span(target)
    least = model.minimise_price()
    return Optimum(least if program.price else model.spread(least), flow)


class _Model:
    """GLOP's model of a FreezeProgram; each solve starts from the basis of the one before."""

    def __init__(self, program: FreezeProgram, time_limit_s: float | None) -> None:
        from ortools.linear_solver import pywraplp  # half a second that importing the planner should not take

        self._program = program
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        self._solver.SuppressOutput()
        self._warm, self._fresh = pywraplp.MPSolverParameters(), pywraplp.MPSolverParameters()
        self._fresh.SetIntegerParam(self._fresh.INCREMENTALITY, self._fresh.INCREMENTALITY_OFF)
        self._statuses = {getattr(pywraplp.Solver, s.value): s for s in SolverStatus if s.value != "NOT_NEEDED"}
        infinity = self._solver.infinity()
        self._starts = [self._solver.NumVar(0.0, infinity, "") for _ in program.dag.actions]
        self._ratios = {
            int(i): self._solver.NumVar(0.0, float(program.most[i]), "") for i in np.flatnonzero(program.ranges > 0.0)
        }
        self._span = self._solver.NumVar(0.0, infinity, "")  # the batch's end, or the period
        iterations = _ITERATIONS + _ITERATIONS_PER_ACTION * len(program.dag.actions)
        self._limit = f" max_number_of_iterations:{iterations}"
        self._edge_rows = self._add_edges(program.dag.edges)
        closing = program.closing
        if not program.overlap:  # GLOP's rounding depends on the order of rows: a set's, so that plans stay the same
            closing = closing._replace(sources=np.array(list(set(closing.sources.tolist()))))
        self._closing, self._closing_rows = closing.sources, self._add_edges(closing, period=program.overlap)
        self._add_budgets()

    def minimise_span(self, target: float = 0.0) -> Flow:
        self._solve([(self._span, 1.0)], "earliest end of the batch", _GLOP_FIRST)
        ends = np.zeros(len(self._starts))
        ends[self._closing] = [row.dual_value() for row in self._closing_rows]
        flow = Flow(np.array([row.dual_value() for row in self._edge_rows], dtype=np.float64), ends)
        # The span that the ratios reach, not GLOP's value of it: later solves can keep that one.
        self._longest = max(self._program.span(self._read()), target)
        return flow

    def minimise_price(self) -> Floats:
        price = self._program.price
        cost = self._in_pieces(price) if price else [(ratio, 1.0) for ratio in self._ratios.values()]
        self._solve_within([(self._span, self._longest)], cost, "least noise" if price else "least freezing")
        return self._read()

    def spread(self, least: Floats) -> Floats:
        """Even out ``least`` without a later end or more freezing. Returns ``least`` when GLOP fails."""
        most = float(least.sum()) * (1.0 + _FREEZING_SLACK)
        total = self._solver.Constraint(-self._solver.infinity(), most)
        for ratio in self._ratios.values():
            total.SetCoefficient(ratio, 1.0)
        squares = tuple((n / _SEGMENTS, n**2 / _SEGMENTS) for n in range(_SEGMENTS + 1))
        try:
            self._solve_within([(self._span, self._longest), (total, most)], self._in_pieces(squares), "even freezing")
        except SolverError:
            return least
        even = self._read()
        in_time = self._program.span(even) <= self._span.Ub() * (1.0 + _SPAN_TOLERANCE)
        return even if in_time and float(even.sum()) <= total.Ub() * (1.0 + _FREEZING_SLACK) else least

    def _in_pieces(self, price: Corners) -> list[tuple[Any, float]]:
        """The price of all ratios, a convex line in pieces, as a cost of new variables."""
        cost = []
        for ratio in self._ratios.values():
            parts = self._solver.Constraint(0.0, 0.0)
            parts.SetCoefficient(ratio, -1.0)
            for (start, low), (end, high) in pairwise(price):
                part = self._solver.NumVar(0.0, end - start, "")
                parts.SetCoefficient(part, 1.0)
                cost.append((part, (high - low) / (end - start)))
        return cost

    def _add_edges(self, edges: Edges, period: bool = False) -> list[Any]:
        """Add a row for each edge: ``P_target - P_source + range * r_source [+ period] >= upper + delay``."""
        nodes, upper = [*self._starts, self._span], self._program.upper.tolist()
        rows = []
        for source, target, delay in zip(*(column.tolist() for column in edges), strict=True):
            row = self._solver.Constraint(upper[source] + delay, self._solver.infinity())
            row.SetCoefficient(nodes[source], -1.0)
            row.SetCoefficient(nodes[target], 1.0)
            if source in self._ratios:
                row.SetCoefficient(self._ratios[source], float(self._program.ranges[source]))
            if period:
                row.SetCoefficient(self._span, 1.0)
            rows.append(row)
        return rows

    def _add_budgets(self) -> None:
        for stage, positions in self._program.stages.items():
            row = self._solver.Constraint(-self._solver.infinity(), self._program.budgets[stage])
            for position in positions.tolist():
                if position in self._ratios:
                    row.SetCoefficient(self._ratios[position], 1.0)

    def _solve_within(self, limits: Sequence[tuple[Any, float]], cost: list[tuple[Any, float]], purpose: str) -> None:
        """Solve with variables or rows limited to what an earlier solve reached."""
        for slack in _SLACKS:
            for bounded, most in limits:
                bounded.SetUb(most * (1.0 + slack))
            try:
                return self._solve(cost, purpose)
            except SolverError as error:
                failure = error
        raise failure

    def _solve(self, cost: list[tuple[Any, float]], purpose: str, parameters: str = _GLOP_NEXT) -> None:
        objective = self._solver.Objective()
        objective.Clear()
        for variable, coefficient in cost:
            objective.SetCoefficient(variable, coefficient)
        objective.SetMinimization()
        status = self._run(parameters, purpose)
        if status in (SolverStatus.ABNORMAL, SolverStatus.FEASIBLE, SolverStatus.NOT_SOLVED):
            status = self._run(_GLOP_AGAIN, purpose)
        if status is not SolverStatus.OPTIMAL:
            raise SolverError(f"GLOP ended {status.value} while looking for the {purpose}")

    def _run(self, parameters: str, purpose: str) -> SolverStatus:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0.0:
                raise SolverError(
                    f"GLOP ended {SolverStatus.NOT_SOLVED.value} while looking for the {purpose}: out of time"
                )
            self._solver.SetTimeLimit(max(1, int(left * 1e3)))
        self._solver.SetSolverSpecificParametersAsString(parameters + self._limit)
        return self._statuses[self._solver.Solve(self._fresh if parameters == _GLOP_AGAIN else self._warm)]

    def _read(self) -> Floats:
        ratios = np.zeros(len(self._starts))
        for position, variable in self._ratios.items():
            ratios[position] = variable.solution_value()
        return np.clip(ratios, 0.0, self._program.most)
