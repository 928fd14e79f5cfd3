"""The ways of the language model study: how a training uses its time, and the plan of each.

Plans are the planner's, for 1F1B with forwards of 1, input gradients of 1.2, weight gradients of 1. They include
the cost of drawing tokens, ``DRAWING``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from benchmarks.language_model.network import STAGES
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.token_cost import TokenCost
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.orders import one_forward_one_backward

MICROBATCHES = 8
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = 1.0, 1.2, 1.0
DRAWING = TokenCost(fixed=0.05, per_token=1.02)
"""Cost in layers of 1,024 columns or more (benchmarks/core/token_cost.py), which the study's layers represent."""


@dataclass(frozen=True)
class Way:
    """How a training uses its time.

    Attributes:
        max_freeze_ratio: 0 freezes nothing.
        defer: weight gradients wait, with this many microbatches more in flight; None leaves them in place.
        target: the speed-up that is enough; None asks for the most.
        granularity, gradient_scale: the settings.
        microbatches: fewer of them for each step than 8.
        overlap: ranks do not meet between steps, so a step takes the plan's period.
        independent: each microbatch draws its masks for itself, as the paper has it.
        evenly: tokens are drawn with equal chances.
        learning_rate: times the task's.
    """

    max_freeze_ratio: float = 0.0
    defer: int | None = None
    target: float | None = None
    granularity: str = "tensor"
    gradient_scale: str = "skipped_as_zero"
    microbatches: int = MICROBATCHES
    overlap: bool = False
    independent: bool = False
    evenly: bool = False
    learning_rate: float = 1.0

    @property
    def samples_tokens(self) -> bool:
        return self.granularity == "token"

    @property
    def freezes(self) -> bool:
        return self.max_freeze_ratio > 0.0


BASE, EXACT = "nothing frozen", "deferred, exact"
LARGER_RATE, FEWER_6, FEWER_5 = "learning rate x 1.5", "6 microbatches instead of 8", "5 microbatches instead of 8"
GOAL_EXACT, GOAL_PAYS, GOAL_PAPER = 'goal "exact"', 'goal "pays"', 'goal "paper"'
EXACT_MORE, PAYS_MORE = f"{GOAL_EXACT}, 4 extra microbatches", f"{GOAL_PAYS}, 4 extra microbatches"
RETIRED = (GOAL_PAYS, PAYS_MORE)
"""Ways of a goal that was taken out. Their trainings are in the results, and none can be added."""

EXACT_FEWER = f"{EXACT_MORE}, 6 microbatches instead of 8"
_TENSORS = Way(0.8, target=1.25)
_DEFERRED = Way(0.8, defer=4, target=1.36)
_MEAN, _TOKENS, _EVENLY = (
    {"gradient_scale": "computed_mean"},
    {"granularity": "token"},
    {"granularity": "token", "evenly": True},
)
GOALS = {
    BASE: Way(),
    LARGER_RATE: Way(learning_rate=1.5),
    FEWER_6: Way(microbatches=6),
    FEWER_5: Way(microbatches=5),
    GOAL_EXACT: Way(defer=0, overlap=True),
    GOAL_PAPER: Way(0.8, overlap=True),
    EXACT_MORE: Way(defer=4, overlap=True),
    EXACT_FEWER: Way(defer=4, overlap=True, microbatches=6),
}
"""The goals as they run where nothing makes ranks meet between steps, and what needs no tool."""

LEVERS = {
    "tensors, independent masks": replace(_TENSORS, independent=True),
    "tensors": _TENSORS,
    "tensors, computed mean": replace(_TENSORS, **_MEAN),
    "tensors, independent masks, the most": Way(0.8, independent=True),
    "tensors, the most": Way(0.8),
    "tensors, computed mean, the most": Way(0.8, **_MEAN),
    "tensors at 1.16x": Way(0.8, target=1.16),
    "tensors at 1.30x": Way(0.8, target=1.3),
    "tokens drawn evenly": replace(_TENSORS, **_EVENLY),
    "tokens": replace(_TENSORS, **_TOKENS),
    "tokens at 1.16x": Way(0.8, target=1.16, **_TOKENS),
    EXACT: Way(defer=4),
    "deferred, 6 microbatches": Way(defer=4, microbatches=6),
    "deferred, tensors, independent masks": replace(_DEFERRED, independent=True),
    "deferred, tensors": _DEFERRED,
    "deferred, tensors, computed mean": replace(_DEFERRED, **_MEAN),
    "deferred, tokens drawn evenly": replace(_DEFERRED, **_EVENLY),
    "deferred, tokens": replace(_DEFERRED, **_TOKENS),
    "deferred, tokens, the most": Way(0.8, defer=4, **_TOKENS),
}
"""One lever at a time, with ranks that meet after each step."""

WAYS = GOALS | LEVERS


@cache
def planned(way: Way) -> FreezePlan:
    """The plan of a way."""
    return solve(_problem(way))


def speedup(plan: FreezePlan) -> float:
    """Return the speedup of a step over the host alone."""
    return _batch_time() / plan.span_ms.planned


def _problem(way: Way) -> PlanProblem:
    schedule = one_forward_one_backward(STAGES, way.microbatches)
    backward = Bounds(INPUT_GRADIENT, INPUT_GRADIENT + WEIGHT_GRADIENT)
    measurement = Measurement(
        schedule,
        {a: backward if a.freezable else Bounds(FORWARD, FORWARD) for a in schedule.actions},
        token_costs={0: DRAWING} if way.samples_tokens else {},
        steps="overlap" if way.overlap else "meet",
    )
    limits = Limits.of_training(
        way.max_freeze_ratio,
        target_makespan_ms=_batch_time() / way.target if way.target else 0.0,
        defer=way.defer is not None,
        extra_microbatches=way.defer or 0,
    )
    return PlanProblem(measurement, limits)


def _batch_time() -> float:
    """Return the batch time of the host alone, with all microbatches."""
    return (MICROBATCHES + STAGES - 1) * (FORWARD + INPUT_GRADIENT + WEIGHT_GRADIENT)
