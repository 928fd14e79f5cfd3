"""The linear program that a plan is the solution of, and what a solver gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tf_adapters.schedule.dag import PipelineDag

__all__ = ["Floats", "Flow", "FreezeProblem", "Optimum", "SolverStatus"]

Floats = NDArray[np.float64]


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
class FreezeProblem:
    """A DAG with durations in any unit, in the order of ``dag.actions``.

    ``ranges`` is how much of ``upper`` full freezing saves, 0 where nothing can be frozen. ``stages`` maps
    a stage to the positions of its actions that can be frozen, ``budgets`` to the largest sum of their
    ratios.
    """

    dag: PipelineDag
    upper: Floats
    ranges: Floats
    stages: Mapping[int, NDArray[np.int64]]
    budgets: Mapping[int, float]

    def end(self, ratios: Floats) -> float:
        """Makespan under ``ratios``, in the problem's unit."""
        return self.dag.end(self.upper - ratios * self.ranges)


class Flow(NamedTuple):
    """GLOP's dual values of the first solve: one per DAG edge, one per action (0 if it has a successor)."""

    edges: Floats
    ends: Floats


@dataclass(frozen=True, eq=False)
class Optimum:
    """Freeze ratios in the order of ``dag.actions`` and the dual values that support their makespan."""

    ratios: Floats
    flow: Flow
