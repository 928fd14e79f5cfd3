"""Control steps: now and then a step runs as the host alone runs, so that the gain is measured against the host.

The steps of monitoring are no baseline. They compute weight gradients apart, which is slower than the host's own way on
narrow layers. A control step is compared with the planned steps around it:

    step     111      112      113      114
             planned  control  planned  planned     planned = mean of 111 and 114
                                                    host = 112 + 113 - planned,  ratio = host / planned

Step 113 counts too, because a rank may pay in it for the control step. Where steps overlap, a late rank finds the
inputs of the control step ready and does not wait for them. It waits in the next step instead, and an early rank does
the reverse. The sum of both steps is the same on all ranks.

The speedup is the median of these ratios. Its interval reaches from the k-th smallest to the k-th largest ratio, with
the largest k that keeps the confidence. It needs independent ratios, but no particular distribution.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

LEAST = 6
"""Fewest control steps for a 95% interval: 6 ratios lie on one side of the true median with probability 1/32."""

_KEPT = 256

_FIRST = 12  # the first control step, counted from the first stable step
_EARLY = 8  # the number of control steps that follow each other soon
_EARLY_EACH = 4  # steps from one of these to the next
_EACH = 100  # steps between later control steps

NEIGHBOURS = 3
"""Steps to wait after a control step: the device has then probably finished the two planned steps that follow it."""

EARLY_KNOWN = _FIRST + (_EARLY - 1) * _EARLY_EACH + NEIGHBOURS
"""Stable steps after which all early control steps can be compared."""


def is_control(stable_step: int) -> bool:
    """Return whether a step is a control step; ``stable_step`` counts from 1 where the plan is fully in force."""
    since = stable_step - _FIRST
    if since < 0:
        return False
    return since % (_EARLY_EACH if since < _EARLY * _EARLY_EACH else _EACH) == 0


class Pair(NamedTuple):
    """Durations in ms of a step of the host alone and of a planned one, from the steps around a control step."""

    microbatches: int
    host_ms: float
    planned_ms: float

    @property
    def ratio(self) -> float:
        return self.host_ms / self.planned_ms


class _Step(NamedTuple):
    number: int
    microbatches: int
    ms: float
    is_control: bool


class ControlPairs:
    """The newest pairs of one rank's steps, as the device finishes them."""

    def __init__(self) -> None:
        self._pairs: deque[Pair] = deque(maxlen=_KEPT)
        self._steps: deque[_Step] = deque(maxlen=4)

    def clear(self) -> None:
        self._pairs.clear()
        self._steps.clear()

    def forget(self, microbatches: int) -> None:
        """Drop the pairs with this number of microbatches."""
        kept = [pair for pair in self._pairs if pair.microbatches != microbatches]
        self.clear()
        self._pairs.extend(kept)

    def add(self, number: int, microbatches: int, ms: float, is_control: bool) -> None:
        """Add a planned step or a control step of ``microbatches``."""
        self._steps.append(_Step(number, microbatches, ms, is_control))
        if [step.is_control for step in self._steps] != [False, True, False, False]:
            return
        before, control, after, later = self._steps
        if later.number - before.number == 3 and len({step.microbatches for step in self._steps}) == 1:
            planned_ms = fmean((before.ms, later.ms))
            host_ms = max(0.0, control.ms + after.ms - planned_ms)  # a slow neighbour would leave less than nothing
            self._pairs.append(Pair(microbatches, host_ms, planned_ms))

    def of(self, microbatches: int | None) -> tuple[Pair, ...]:
        """Return the pairs with this number of microbatches; None asks for all."""
        return tuple(pair for pair in self._pairs if microbatches in (None, pair.microbatches))


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as long the host alone takes: the median of ``steps`` control steps, and its 95% interval."""

    value: float
    low: float
    high: float
    steps: int
    host_ms: float


def speedup(pairs: Sequence[Pair], confidence: float = 0.95) -> Speedup | None:
    """Return the speedup over the host alone; None before there are enough control steps for such an interval."""
    ratios = sorted(pair.ratio for pair in pairs)
    count = len(ratios)
    outside = _outside(count, confidence)
    if outside is None:
        return None
    host_ms = median(pair.host_ms for pair in pairs)
    high = ratios[count - 1 - outside]
    return Speedup(median(ratios), low=ratios[outside], high=high, steps=count, host_ms=host_ms)


def _outside(count: int, confidence: float) -> int | None:
    """Return how many values to drop at each end, so that the others span the interval; None if there are too few.

    Each of ``count`` values lies below the true median with probability 1/2.
    """
    chance, found = 0.0, None
    for below in range(count // 2):
        chance += 2 * math.comb(count, below) / 2**count
        if chance > 1.0 - confidence:
            break
        found = below
    return found
