"""Backwards of the first stage that are frozen whole, and are then no work at all.

The first stage passes no input gradient on: with all of its parameters frozen nothing is left of a backward, while a
mask of part of them saves weight gradients only. So a whole backward saves about twice the time per frozen parameter.
The linear program knows the straight line of partial masks; which backwards to freeze whole is tried out: the last
ones, since nothing of the batch is left to hide them behind. Every parameter of the stage loses the same updates.

Prefixes of the stage's layers would save as much. But what is in one prefix is in every longer one, so with equal
chances for all parameters a prefix is everything or nothing; and where chance decides which microbatches have one, the
others wait for it (``benchmarks/first_stage.py``). So the plan decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tf_adapters.errors import SolverError
from tf_adapters.ir import Action
from tf_adapters.lp import FreezeProblem

__all__ = ["FIRST_STAGE", "disappears", "earliest_end", "frozen_whole"]

FIRST_STAGE = 0
_TRIED = 8
"""Numbers of whole backwards that are tried, besides none and one, in programs that take a moment."""

_TRIED_ALL_UP_TO = 500
"""Actions. Beyond, only half of what the budget has room for is tried: under GPipe the best is near it."""

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
    """Of all numbers of whole backwards that are tried, the one that ends the batch earliest and freezes least.

    An end by ``target`` is early enough. Raises SolverError where ``optimise`` fails on the problem as it is given;
    failures further on end the search.
    """
    found = [(problem, optimise(problem))]
    for count in _counts(problem):
        left, whole = frozen_whole(problem, count)
        try:
            outcome = optimise(left)
        except SolverError:
            break
        outcome.ratios[whole] = 1.0
        found.append((left, outcome))
    ends = [max(target, left.end(outcome.ratios)) for left, outcome in found]
    early = [pair for pair, end in zip(found, ends, strict=True) if end <= min(ends) * (1.0 + _AS_EARLY)]
    return min(early, key=lambda pair: float(pair[1].ratios.sum()))


def _counts(problem: FreezeProblem) -> list[int]:
    """Numbers of whole backwards worth a try: from one, which 1F1B takes, to what the budget has room for."""
    most = math.floor(problem.budgets[FIRST_STAGE] + 1e-9)
    few = len(problem.upper) > _TRIED_ALL_UP_TO
    shares = (0.5,) if few else [part / _TRIED for part in range(1, _TRIED + 1)]
    tried = {1, *(round(share * most) for share in shares)}
    return sorted(count for count in tried if 1 <= count <= most)
