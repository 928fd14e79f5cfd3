"""Backwards of the first stage that are frozen whole, and are then no work at all.

The first stage passes no input gradient on: with all of its parameters frozen nothing is left of a backward, while a
mask of part of them saves weight gradients only. So a whole backward saves about twice the time per frozen parameter.
The linear program knows the straight line of partial masks; whether the very last backward, which nothing of the batch
is left to hide behind, is better frozen whole is tried out.

Only that one. Under GPipe more of them would end the batch as early with a lower mean freeze ratio, but a network
learned no more from that than from the same step with all microbatches frozen alike (``benchmarks/learning.py``).
Prefixes of the stage's layers would save as much, too. But what is in one prefix is in every longer one, so with equal
chances for all parameters a prefix is everything or nothing; and where chance decides which microbatches have one, the
others wait for it (``benchmarks/first_stage.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tf_adapters.errors import SolverError
from tf_adapters.planner.program import FreezeProblem
from tf_adapters.schedule.ir import Action

__all__ = ["FIRST_STAGE", "disappears", "earliest_end", "frozen_whole"]

FIRST_STAGE = 0
_ROUNDING = 1e-9
_AS_EARLY = 1e-3
"""Share of the makespan by which ends are alike: of these the plan that freezes least is taken."""


class _Ratios(Protocol):
    @property
    def ratios(self) -> NDArray[np.float64]: ...


_O = TypeVar("_O", bound=_Ratios)


def disappears(action: Action) -> bool:
    """Whether nothing of a backward is left once all of its parameters are frozen: stage 0 passes no gradient on.

    With split backwards that is stage 0's W: torch computes its whole backward there and nothing in its I.
    """
    return action.stage == FIRST_STAGE and action.freezable


def frozen_whole(problem: FreezeProblem, count: int) -> tuple[FreezeProblem, NDArray[np.int64]]:
    """The problem that is left when the last ``count`` backwards of the first stage are frozen whole; and these."""
    last = problem.stages[FIRST_STAGE][-count:] if count else np.array([], dtype=np.int64)
    upper, ranges, budget = problem.upper.copy(), problem.ranges.copy(), problem.budgets[FIRST_STAGE] - count
    upper[last] = ranges[last] = 0.0
    if budget <= 0.0:
        ranges[problem.stages[FIRST_STAGE]] = 0.0  # a budget of nothing has no inside for an interior point
    budgets = {**problem.budgets, FIRST_STAGE: max(0.0, budget)}
    return replace(problem, upper=upper, ranges=ranges, budgets=budgets), last


def earliest_end(
    problem: FreezeProblem, optimise: Callable[[FreezeProblem], _O], target: float
) -> tuple[FreezeProblem, _O]:
    """The problem as it is given, or with the first stage's last backward frozen whole: what ends the batch earlier.

    Of ends that are alike, or by ``target``, the one that freezes less. Raises SolverError where ``optimise`` fails on
    the problem as it is given; that it fails on the other one only rules that out.
    """
    plain = problem, optimise(problem)
    if problem.budgets[FIRST_STAGE] < 1.0 - _ROUNDING:
        return plain
    left, last = frozen_whole(problem, 1)
    try:
        outcome = optimise(left)
    except SolverError:
        return plain
    outcome.ratios[last] = 1.0
    found = [plain, (left, outcome)]
    ends = [max(target, tried.end(outcome.ratios)) for tried, outcome in found]
    early = [pair for pair, end in zip(found, ends, strict=True) if end <= min(ends) * (1.0 + _AS_EARLY)]
    return min(early, key=lambda pair: float(pair[1].ratios.sum()))
