"""The planner's program for large pipelines: an interior point method made for it, in time linear in its size.

GLOP's time grows with the square of the number of actions. This program has a structure that a general solver does
not see. A Newton step of a primal-dual method solves ``A' D A dx = y`` with D diagonal, where a row of A is an edge
of the DAG, a bound of a ratio, or a stage's budget:

- a ratio stands only in the edges that leave its action, so it is eliminated by hand;
- the edges then leave a weighted Laplacian of the DAG, which is as narrow as the pipeline: its Cholesky factor has
  some two entries per stage in a row, however many microbatches there are;
- the budgets, one dense row per stage, are a correction of that rank (Woodbury's formula).

One objective, the batch's end plus a small price on freezing, stands for GLOP's solves in order of importance: freezing
that buys no time vanishes, and the end is later than the earliest by less than the price of all freezing. Of several
optima an interior point method finds the middle, which is the even spread that GLOP needs a third solve for.

The method is Mehrotra's predictor-corrector (SIAM J. Optimization 2, 1992; Nocedal and Wright, "Numerical
Optimization", algorithm 14.3) with Gondzio's further correctors (Comput. Optim. Appl. 6, 1996), which are worth it
here: a factorisation costs as much as thirty solves.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import splu

from tf_adapters.errors import SolverError
from tf_adapters.planner.program import Flow, FreezeProblem, Optimum, SolverStatus

__all__ = ["solve_interior"]

Floats = NDArray[np.float64]

_PRICE = 2e-4
"""Of all the freezing that the budgets allow, as a share of the unfrozen makespan."""

_TOLERANCE = 2e-6
"""Of the objective: the relative gap at which a solve ends."""

_MOST_STEPS = 80
_PATIENCE = 4
"""Steps without progress after which the best iterate is as good as floats allow."""

_REFINEMENTS = 2
_EXACT = 1e-12
"""Of the right side: a residual that needs no refinement."""

_CORRECTORS = 4
"""At most, in one step."""

_FURTHER = 0.2
"""How much further than it could a corrector makes a step go."""

_BETA = 0.1
"""Products of slack and dual value that are within this factor of their aim are left alone."""

_NEARLY = 0.995
"""Share of the way to the boundary that a step goes."""


def solve_interior(problem: FreezeProblem, time_limit_s: float | None = None, target: float = 0.0) -> Optimum:
    """Nearly optimal ratios, and the flow that proves how near.

    Arguments as ``lp.solve`` has them. Raises SolverError when it is out of time.
    """
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    program = _Program.of(problem)
    makespan = problem.end(np.zeros_like(problem.upper))
    price = _PRICE * makespan / program.budgets.sum()
    earliest = _minimise(program, program.cost(1.0, price), deadline)
    flow = program.flow(earliest)
    if problem.end(program.ratios(earliest)) >= target:
        return Optimum(program.ratios(earliest), flow)
    # Freezing alone has a price; its scale is the objective's with the end in it, which the tolerance is made for.
    bounded = program.ending_by(target)
    return Optimum(program.ratios(_minimise(bounded, bounded.cost(0.0, price / _PRICE), deadline)), flow)


@dataclass(frozen=True, eq=False)
class _Program:
    """``min cost x`` where ``rows x - least = slack >= 0``; x is the start times, the batch's end and the ratios.

    The rows are, in this order: DAG edges, ends of actions without successor, starts of actions without
    predecessor, ratios at least 0, ratios at most 1, budgets.
    """

    problem: FreezeProblem
    rows: sparse.csr_array
    least: Floats
    freezable: NDArray[np.int64]
    """The action of each ratio."""
    members: sparse.csr_array
    """Budgets by ratios: 1 where a ratio counts."""
    budgets: Floats

    @classmethod
    def of(cls, problem: FreezeProblem) -> _Program:
        dag, actions = problem.dag, len(problem.upper)
        freezable = np.flatnonzero(problem.ranges > 0.0)
        ratios = len(freezable)
        last, first = (np.setdiff1d(np.arange(actions), ends) for ends in (dag.edges.sources, dag.edges.targets))
        sources = np.concatenate([dag.edges.sources, last])
        targets = np.concatenate([dag.edges.targets, np.full(len(last), actions)])
        delays = np.concatenate([dag.edges.delay, np.zeros(len(last))])
        one, own = (sparse.eye_array(size, format="csr") for size in (actions + 1, ratios))
        saved = sparse.csr_array((problem.ranges[freezable], (freezable, np.arange(ratios))), (actions, ratios))
        members = sparse.csr_array(np.stack([np.isin(freezable, p) for p in problem.stages.values()]), dtype=float)
        budgets = np.array([problem.budgets[stage] for stage in problem.stages])
        rows = sparse.block_array(
            [
                [one[targets] - one[sources], saved[sources]],
                [one[first], None],
                [None, own],
                [None, -own],
                [None, -members],
            ],
            format="csr",
        )
        least = [problem.upper[sources] + delays, np.zeros(len(first) + ratios), -np.ones(ratios), -budgets]
        return cls(problem, rows, least=np.concatenate(least), freezable=freezable, members=members, budgets=budgets)

    def ending_by(self, latest: float) -> _Program:
        """The same with one more row, before the budgets: the batch ends by ``latest``."""
        row = sparse.csr_array(([-1.0], ([0], [len(self.problem.upper)])), (1, self.rows.shape[1]))
        split = self.rows.shape[0] - len(self.budgets)
        rows = sparse.vstack([self.rows[:split], row, self.rows[split:]], format="csr")
        return replace(self, rows=rows, least=np.insert(self.least, split, -latest))

    def cost(self, end: float, price: float) -> Floats:
        """``end`` for each unit of time that the batch takes, ``price`` for each ratio of 1."""
        cost = np.zeros(self.rows.shape[1])
        cost[len(self.problem.upper)] = end
        cost[len(self.problem.upper) + 1 :] = price
        return cost

    def inside(self) -> Floats:
        """An x with slack in every row: half of every budget used, every action a little late."""
        problem = self.problem
        half = (np.minimum(0.5, 0.5 * self.budgets / np.maximum(1.0, self.members.sum(axis=1)))) @ self.members
        durations = problem.upper.copy()
        durations[self.freezable] -= half * problem.ranges[self.freezable]
        late = 1.02 * durations + 0.01
        starts = problem.dag.earliest_starts(late) + 0.01
        return np.concatenate([starts, [np.max(starts + late)], half])

    def ratios(self, point: _Point) -> Floats:
        """Freeze ratios in the order of the DAG's actions."""
        ratios = np.zeros_like(self.problem.upper)
        ratios[self.freezable] = np.clip(point.x[len(ratios) + 1 :], 0.0, 1.0)
        return ratios

    def flow(self, point: _Point) -> Flow:
        """Dual values of the precedence rows."""
        edges = self.problem.dag.edges
        ends = np.zeros_like(self.problem.upper)
        last = np.setdiff1d(np.arange(len(ends)), edges.sources)
        ends[last] = point.z[len(edges.sources) : len(edges.sources) + len(last)]
        return Flow(point.z[: len(edges.sources)], ends)


@dataclass(frozen=True, eq=False)
class _Point:
    """Primal values, slacks of the rows and their dual values; the last two are positive."""

    x: Floats
    s: Floats
    z: Floats


def _minimise(program: _Program, cost: Floats, deadline: float | None) -> _Point:
    """The best point found; it ends at ``_TOLERANCE``, or where rounding errors let it come no nearer."""
    rows = program.rows
    point = _start(program)
    best, least_error, since = point, np.inf, 0
    for _ in range(_MOST_STEPS):
        primal = rows @ point.x - point.s - program.least
        dual = cost - rows.T @ point.z
        error = _error(float(cost @ point.x), point, primal, dual)
        best, least_error, since = (point, error, 0) if error < least_error else (best, least_error, since + 1)
        if least_error < _TOLERANCE or since == _PATIENCE or not np.isfinite(error):
            break
        if deadline is not None and time.monotonic() > deadline:
            raise SolverError(f"interior point ended {SolverStatus.NOT_SOLVED.value}: out of time")
        try:
            point = _step(program, point, primal, dual)
        except (RuntimeError, np.linalg.LinAlgError):  # a matrix that is singular to working precision
            break
    return best


def _start(program: _Program) -> _Point:
    """Well inside the constraints, all products of slack and dual value alike."""
    x = program.inside()
    s = np.maximum(program.rows @ x - program.least, 1e-6)
    mean = float(s.mean()) / len(program.budgets)
    return _Point(x, s, mean / s)


def _error(objective: float, point: _Point, primal: Floats, dual: Floats) -> float:
    """How far from optimal, relative to the objective: complementarity, and what both sides violate."""
    return (float(point.s @ point.z) + float(np.abs(primal).max()) + float(np.abs(dual).max())) / (1.0 + objective)


def _step(program: _Program, point: _Point, primal: Floats, dual: Floats) -> _Point:
    """One predictor step, its corrector, and further correctors as long as they let the step go further."""
    rows, (x, s, z) = program.rows, (point.x, point.s, point.z)
    newton = _Newton(program, z / s)

    def direction(complementarity: Floats) -> tuple[Floats, Floats, Floats]:
        dx = newton.solve(rows.T @ ((complementarity - z * primal) / s) - dual)
        ds = rows @ dx + primal
        return dx, ds, (complementarity - z * ds) / s

    _, ds, dz = direction(-s * z)
    mean = float(s @ z) / len(s)
    after = float((s + _reach(s, ds) * ds) @ (z + _reach(z, dz) * dz)) / len(s)
    aim = mean * (after / mean) ** 3
    complementarity = aim - s * z - ds * dz
    dx, ds, dz = direction(complementarity)
    for _ in range(_CORRECTORS):
        reach, dual_reach = _reach(s, ds), _reach(z, dz)
        further, dual_further = min(1.0, reach + _FURTHER), min(1.0, dual_reach + _FURTHER)
        products = (s + further * ds) * (z + dual_further * dz)
        wanted = np.clip(products, _BETA * aim, aim / _BETA) - products
        corrected = complementarity + np.maximum(wanted, -aim / _BETA)
        better = direction(corrected)
        if _reach(s, better[1]) + _reach(z, better[2]) < reach + dual_reach + 0.1 * _FURTHER:
            break
        complementarity, (dx, ds, dz) = corrected, better
    along, dual_along = _NEARLY * _reach(s, ds), _NEARLY * _reach(z, dz)
    return _Point(x + along * dx, s + along * ds, z + dual_along * dz)


def _reach(values: Floats, change: Floats) -> float:
    """The largest step in [0, 1] that keeps ``values`` from turning negative."""
    falling = change < 0.0
    return min(1.0, float(np.min(-values[falling] / change[falling], initial=1.0)))


class _Newton:
    """``A' D A`` for one D, factored."""

    def __init__(self, program: _Program, weights: Floats) -> None:
        self._rows, self._weights, self._members = program.rows, weights, program.members
        self._times = len(program.problem.upper) + 1
        own, budgets = weights[: -len(program.budgets)], weights[-len(program.budgets) :]
        times, ratios = program.rows[: len(own), : self._times], program.rows[: len(own), self._times :]
        self._diagonal = ratios.power(2).T @ own
        weighted = sparse.diags_array(own)
        self._coupling = times.T @ (weighted @ ratios)
        eliminated = self._coupling @ sparse.diags_array(1.0 / self._diagonal) @ self._coupling.T
        self._factor = splu(
            (times.T @ (weighted @ times) - eliminated).tocsc(),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
        by_time = (self._coupling @ sparse.diags_array(1.0 / self._diagonal) @ self._members.T).toarray()
        sums = self._members @ (1.0 / self._diagonal)
        self._answer = self._factor.solve(by_time)
        self._correction = np.diag(1.0 / budgets + sums) + by_time.T @ self._answer

    def solve(self, right: Floats) -> Floats:
        """x with ``A' D A x = right``, refined: near the optimum the matrix is badly conditioned."""
        found = self._once(right)
        for _ in range(_REFINEMENTS):
            left = right - self._rows.T @ (self._weights * (self._rows @ found))
            if np.abs(left).max() <= _EXACT * np.abs(right).max():
                break
            found = found + self._once(left)
        return found

    def _once(self, right: Floats) -> Floats:
        ratios = right[self._times :]
        times = self._factor.solve(right[: self._times] - self._coupling @ (ratios / self._diagonal))
        free = (ratios - self._coupling.T @ times) / self._diagonal
        pull = np.linalg.solve(self._correction, self._members @ free)
        times = times + self._answer @ pull
        return np.concatenate([times, (ratios - pull @ self._members - self._coupling.T @ times) / self._diagonal])
