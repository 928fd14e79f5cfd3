"""The freeze program of large pipelines: an interior point method whose time is linear in the number of actions.

GLOP's time grows with the square of that number. The Newton systems have a structure that a general solver does not
see (``newton``).

One objective replaces GLOP's solves in order of importance: the batch's end (or the period, if steps overlap) plus a
small price on freezing or on the noise of draws. The price removes all freezing that buys no time. It makes the end
later than the earliest one, but by less than the price of all freezing. If there are several optima, an interior point
method finds their middle. This middle is the even spread for which GLOP needs a third solve.

The method is Mehrotra's predictor-corrector (SIAM J. Optimization 2, 1992; Nocedal and Wright, "Numerical
Optimization", algorithm 14.3) with Gondzio's further correctors (Comput. Optim. Appl. 6, 1996), which are worth it
here: a factorisation costs as much as thirty solves.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tf_adapters.errors import SolverError
from tf_adapters.planner.newton import Newton, StandardForm
from tf_adapters.planner.program import Floats, FreezeProgram, Optimum, Progress, SolverStatus

_PRICE = 2e-4
"""Price of all the freezing that the budgets allow, as a share of the unfrozen makespan."""

_TOLERANCE = 4e-6
"""Relative error of the objective at which a solve ends."""

_USABLE = 1e-2
"""Relative error up to which an iterate is returned when time is up."""

_MOST_STEPS = 120
_PATIENCE = 6
"""A solve ends after this many steps in a row that do not lower the least relative error: rounding limits it."""

_SETTLED = 1e-3
"""Steps without progress count only after the relative error has been below this. Before that, the objective can fall
faster than the error, so that the relative error grows."""

_LOST = 1e3
"""A solve ends when its relative error exceeds the least one by this factor: from there, rounding errors only grow."""

_CORRECTORS = 8
"""The most further correctors in one step."""

_FURTHER = 0.15
"""Factor by which a corrector tries to lengthen a step."""

_BETA = 0.1
"""A corrector changes only products of slack and dual value below ``_BETA`` * aim or above aim / ``_BETA``."""

_NEARLY = 0.95
"""Share of the way to the boundary that a step goes."""


def solve_interior(
    program: FreezeProgram, progress: Progress, time_limit_s: float | None = None, target: float = 0.0
) -> Optimum:
    """Nearly optimal ratios, and the flow that proves how near.

    A batch that ends by ``target`` is early enough: nothing is frozen to end it earlier. ``progress`` is told after
    every step. Raises SolverError when time is up before an iterate is usable.
    """
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    form = StandardForm.of(program)
    price = _PRICE * program.span(np.zeros_like(program.upper)) / form.budgets.sum()
    earliest = _minimise(form, form.cost(span=1.0, price=price), deadline, progress)
    flow, ratios = form.flow(earliest.z), form.ratios(earliest.x)
    if program.span(ratios) >= target:
        return Optimum(ratios, flow)
    # The price of freezing alone is scaled to the size of the first objective, which the tolerance is made for.
    bounded = StandardForm.of(program, longest=target)
    cheapest = _minimise(bounded, bounded.cost(span=0.0, price=price / _PRICE), deadline, progress)
    return Optimum(bounded.ratios(cheapest.x), flow)


@dataclass(frozen=True, eq=False)
class _Point:
    """Primal values, slacks of the rows and their dual values; slacks and dual values are positive."""

    x: Floats
    s: Floats
    z: Floats


def _minimise(form: StandardForm, cost: Floats, deadline: float | None, progress: Progress) -> _Point:
    """The best iterate; ends at ``_TOLERANCE``, where rounding errors stop progress, or at the deadline."""
    point = _start(form)
    best, least_error, stalled = point, np.inf, 0
    for step in range(_MOST_STEPS):
        primal = form.rows @ point.x - point.s - form.least
        dual = cost - form.rows.T @ point.z
        error = _error(float(cost @ point.x), point, primal, dual)
        if error < least_error:
            best, least_error, stalled = point, error, 0
        elif least_error < _SETTLED:
            stalled = _PATIENCE if error > _LOST * least_error else stalled + 1
        if least_error < _TOLERANCE or stalled == _PATIENCE or not np.isfinite(error):
            break
        if deadline is not None and time.monotonic() > deadline:
            if least_error < _USABLE:
                break
            raise SolverError(f"interior point ended {SolverStatus.NOT_SOLVED.value}: out of time")
        progress(f"interior point, step {step + 1}: within {least_error:.1e} of the optimum, until {_TOLERANCE:g}")
        try:
            point = _step(form, point, primal=primal, dual=dual)
        except RuntimeError:  # a matrix that is singular to working precision
            break
    return best


def _start(form: StandardForm) -> _Point:
    """Well inside the constraints, all products of slack and dual value alike."""
    x = form.inside()
    s = np.maximum(form.rows @ x - form.least, 1e-6)
    mean = float(s.mean()) / len(form.budgets)
    return _Point(x, s, mean / s)


def _error(objective: float, point: _Point, primal: Floats, dual: Floats) -> float:
    """How far from optimal, relative to the objective: complementarity, and what both sides violate."""
    return (float(point.s @ point.z) + float(np.abs(primal).max()) + float(np.abs(dual).max())) / (1.0 + objective)


def _step(form: StandardForm, point: _Point, primal: Floats, dual: Floats) -> _Point:
    """One predictor step, its corrector, and further correctors as long as they make the step longer."""
    rows, (x, s, z) = form.rows, (point.x, point.s, point.z)
    newton = Newton(form, z / s)

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
