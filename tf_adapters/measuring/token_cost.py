"""The time of a weight gradient from sampled tokens: a line in the share of the tokens that is kept.

Drawing and gathering also take time, so the line does not start at 0. A plan's freeze ratio is the share of the weight
gradients' time that a stage saves. ``kept`` converts it to the share of the tokens.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from tf_adapters.measuring.estimates import median, weighted_median
from tf_adapters.measuring.phase import Phase
from tf_adapters.schedule.ir import Action

if TYPE_CHECKING:  # the planner imports this module, and no torch
    from tf_adapters.measuring.timer import ActionTimer

_LEAST_KEPT = 1 / 4
"""The least share of the tokens. A sample's noise is proportional to ``1 / kept - 1``. A plan without a target asks for
the earliest end, and without this limit would skip nearly all tokens of some microbatches."""

_WHOLE_UP_TO = 0.02
"""Below this freeze ratio, no tokens are drawn."""

_APART = 0.1
"""The least difference of two kept shares that gives a slope."""

_PACE_FROM = 0.05
"""The least share of a backward at which its input gradients show how fast the step was."""

_MOST_POINTS = 128


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Time of a stage's weight gradients, relative to that with all tokens: ``fixed + per_token * kept``."""

    fixed: float = 0.0
    per_token: float = 1.0

    def kept(self, ratio: float) -> float:
        """Return the share of the tokens, in (0, 1], for a freeze ratio in [0, 1]."""
        if ratio <= _WHOLE_UP_TO:
            return 1.0
        return min(1.0, max(_LEAST_KEPT, (1.0 - ratio - self.fixed) / self.per_token))

    def noise(self, ratio: float) -> float:
        """Return the added noise at a freeze ratio in [0, 1], in units of the noise at ``1 / kept - 1 = 1``."""
        return 1.0 / self.kept(ratio) - 1.0

    @property
    def most_frozen(self) -> float:
        """The largest possible freeze ratio, in [0, 1]. Some tokens are always kept."""
        return max(0.0, 1.0 - self.fixed - self.per_token * _LEAST_KEPT)


def _cost(value: Any) -> TokenCost:
    try:
        fixed, per_token = (value.fixed, value.per_token) if isinstance(value, TokenCost) else value
        if 0.0 <= fixed < math.inf and 0.0 < per_token < math.inf:
            return TokenCost(fixed, per_token)
    except (TypeError, ValueError):
        pass
    raise ValueError("is not [fixed, per token], a share of a weight gradient's time from 0 and one above 0")


CostPair = Annotated[TokenCost, PlainValidator(_cost), PlainSerializer(lambda cost: [cost.fixed, cost.per_token])]


def slower_cost(a: TokenCost, b: TokenCost) -> TokenCost:
    """Return the larger of each figure."""
    return TokenCost(max(a.fixed, b.fixed), max(a.per_token, b.per_token))


def measured_token_cost(timer: ActionTimer, upper: Mapping[Action, float]) -> TokenCost | None:
    """Fit the line to one stage's backwards in monitoring; None if no tokens were skipped.

    ``upper`` has their times in ms with nothing frozen. Monitoring uses ``TokenCost()``.
    """
    points = _points(timer, upper)[-_MOST_POINTS:]
    if not points:
        return None
    slopes = [
        ((b_left - a_left) / (b_kept - a_kept), abs(b_kept - a_kept))
        for (a_kept, a_left), (b_kept, b_left) in itertools.combinations(points, 2)
        if abs(b_kept - a_kept) >= _APART
    ]
    per_token = max(_APART, weighted_median(slopes)) if slopes else 1.0
    fixed = statistics.median(left - per_token * kept for kept, left in points)
    return TokenCost(max(0.0, fixed), per_token)


def _points(timer: ActionTimer, upper: Mapping[Action, float]) -> list[tuple[float, float]]:
    """Return pairs of the kept share of the tokens and the remaining share of the weight gradients' time."""
    points = []
    for action, whole_ms in upper.items():
        first = median(timer.first_parts(Phase.MONITORING_UPPER, action))
        if first is None or first >= 1.0 or whole_ms <= 0.0:
            continue
        for phase in (Phase.MONITORING_LOWER, Phase.MONITORING_MIXED):
            for sample in timer.samples(phase, action):
                kept, part = TokenCost().kept(sample.share), sample.first_part
                if kept < 1.0 and part is not None:
                    # The input gradients of the same backward tell how fast its step was.
                    pace = part * sample.ms / (first * whole_ms) if min(first, part) >= _PACE_FROM else 1.0
                    points.append((kept, (1.0 - part) * sample.ms / ((1.0 - first) * whole_ms * pace)))
    return points
