"""The linear program that a plan is the solution of, and what a solver gives back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tf_adapters.errors import PlanInputError
from tf_adapters.measuring.estimates import grouped
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.schedule.dag import Edges, Floats, PipelineDag

__all__ = ["Corners", "Floats", "Flow", "FreezeProgram", "Optimum", "Progress", "SolverStatus"]

Progress = Callable[[str], None]
"""Told, in words, how far a solve has come."""

Corners = tuple[tuple[float, float], ...]
"""The corners of a piecewise linear price: ratios, ascending, and their prices."""

_PRICED = 16
"""The number of intervals of the ratio at whose ends a price is computed."""

_GRID = 2.0**-34
_TOLERANCE = 1e-6


class SolverStatus(str, Enum):
    """How a solve ended, in GLOP's words; NOT_NEEDED when nothing may be frozen or nothing can be gained."""

    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"
    UNBOUNDED = "UNBOUNDED"
    ABNORMAL = "ABNORMAL"
    MODEL_INVALID = "MODEL_INVALID"
    NOT_SOLVED = "NOT_SOLVED"
    NOT_NEEDED = "NOT_NEEDED"


@dataclass(frozen=True, eq=False)
class FreezeProgram:
    """A DAG with durations in any unit, in the order of ``dag.actions``.

    ``ranges`` is the part of ``upper`` that full freezing saves, 0 where nothing can be frozen. ``stages`` maps a stage
    to the positions of its B and W actions, ``budgets`` maps it to the largest sum of their ratios. ``most`` is the
    largest ratio of each action, in [0, 1]. ``price`` is the cost of one action's ratio, to minimise among plans of the
    shortest span: the corners of a convex, piecewise linear function that begins at (0, 0). Without corners, the cost
    is the ratio itself.
    """

    dag: PipelineDag
    upper: Floats
    ranges: Floats
    stages: Mapping[int, NDArray[np.int64]]
    budgets: Mapping[int, float]
    most: Floats
    price: Corners = ()

    @classmethod
    def of(cls, problem: PlanProblem) -> FreezeProgram:
        """The program of a valid problem, in ms. Raises PlanInputError for times whose sum no float holds."""
        dag, times = problem.measurement.dag, problem.measurement.times
        upper = np.array([times[action].upper for action in dag.actions])
        lower = np.array([times[a].lower if a.freezable else times[a].upper for a in dag.actions])
        if not math.isfinite(dag.span(upper)):
            raise PlanInputError("times: they add up to more than a float holds")
        members = grouped((a.stage, position) for position, a in enumerate(dag.actions) if a.freezable)
        return cls(
            dag=dag,
            upper=upper,
            ranges=upper - lower,
            stages={stage: np.array(positions) for stage, positions in sorted(members.items())},
            budgets={stage: problem.limits.max_freeze_ratio * len(positions) for stage, positions in members.items()},
            most=np.full(len(upper), problem.most_frozen),
            price=_convex_below(problem.price, problem.most_frozen) if problem.token_cost else (),
        )

    def frozen_microbatches(self, ratios: Floats, limit: float) -> list[int]:
        """The microbatches whose mean ratio over the stages exceeds ``limit``."""
        every = (position for positions in self.stages.values() for position in positions.tolist())
        of_microbatch = grouped((self.dag.actions[position].microbatch, float(ratios[position])) for position in every)
        return [m for m, values in of_microbatch.items() if sum(values) > (limit + _TOLERANCE) * len(values)]

    def limited(self, microbatches: Collection[int], limit: float) -> FreezeProgram:
        """Return the program with a lower ``most`` for ``microbatches``: no mean over the stages exceeds ``limit``.

        Ratios of the first stage stay free, since its backward disappears if it is frozen whole. Where the limit allows
        less than one whole backward of a microbatch, the limit is each stage's.
        """
        most = self.most.copy()
        every = (position for positions in self.stages.values() for position in positions.tolist())
        of_microbatch = grouped((self.dag.actions[position].microbatch, position) for position in every)
        for microbatch in microbatches:
            positions = of_microbatch[microbatch]
            first = [position for position in positions if self.dag.actions[position].stage == 0]
            others = [position for position in positions if position not in first]
            left = limit * len(positions) - len(first)
            if left >= 0.0 and others:
                most[others] = np.minimum(most[others], left / len(others))
            else:
                most[positions] = np.minimum(most[positions], limit)
        return replace(self, most=most)

    @property
    def overlap(self) -> bool:
        """Return whether steps overlap, so that the span is the period."""
        return len(self.dag.loops.sources) > 0

    @cached_property
    def closing(self) -> Edges:
        """The edges that bound the span: the loops if steps overlap, else one from each last action to the batch's end.

        The batch's end is node ``len(upper)``. A last action has no successor.
        """
        if self.overlap:
            return self.dag.loops
        last = np.setdiff1d(np.arange(len(self.upper)), self.dag.edges.sources)
        return Edges(last, np.full(len(last), len(self.upper)), np.zeros(len(last)))

    def span(self, ratios: Floats) -> float:
        """The makespan, or the period if steps overlap, under ``ratios`` and in the program's unit."""
        return self.dag.span(self.upper - ratios * self.ranges)

    def scaled(self) -> FreezeProgram | None:
        """The same program without a unit of time, or None when every time is 0.

        Times become multiples of the unfrozen span, rounded to a grid of 2**-34 of it. Without the rounding
        the same times in other units differ in their last bit, and that bit can choose another one of several
        optima. The factor, about a rank's number of actions, then brings a typical duration near 1, GLOP's size.
        """
        span = self.span(np.zeros_like(self.upper))
        if span == 0.0:
            return None
        factor = 2.0 ** math.ceil(math.log2(len(self.dag.actions) / len(self.stages) + 1.0))

        def rescale(times: Floats) -> Floats:
            return np.asarray(np.round(times / span / _GRID) * _GRID * factor, dtype=np.float64)

        upper = rescale(self.upper)
        ranges = upper - rescale(self.upper - self.ranges)
        return replace(self, dag=self.dag.with_delays(rescale), upper=upper, ranges=ranges)


def _convex_below(price: Callable[[float], float], most: float) -> Corners:
    """The highest convex line that is nowhere above a ``price`` of ratios from 0 to ``most``; empty for 0 alone."""
    if most == 0.0:
        return ()
    corners: list[tuple[float, float]] = []
    for number in range(_PRICED + 1):
        ratio = most * number / _PRICED
        corner = ratio, price(ratio)
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-1], corner):
            corners.pop()
        corners.append(corner)
    return tuple(corners)


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


class Flow(NamedTuple):
    """Dual values of the shortest span: one per DAG edge, and one per action.

    The value of an action belongs to its constraint on the span. If ranks meet, every action without a successor has
    such a constraint: it ends within the makespan. If steps overlap, every rank's last action has one: it ends within
    the period. All other actions have the value 0.
    """

    edges: Floats
    ends: Floats


@dataclass(frozen=True, eq=False)
class Optimum:
    """Freeze ratios in the order of ``dag.actions`` and the dual values that support their span."""

    ratios: Floats
    flow: Flow
