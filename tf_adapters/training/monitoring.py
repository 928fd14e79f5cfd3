"""Freeze ratios of monitoring steps that train: one for each microbatch of a stage, all over the range at once.

The paper's monitoring freezes everything for half of its steps, in which no parameter is updated. Here each stage
freezes nothing in one microbatch of every step and everything in another, so every parameter is updated in every step,
and each step shows the whole line from one bound to the other.
"""

from __future__ import annotations

import math

_GOLDEN = (math.sqrt(5) - 1) / 2


def drawn_ratio(turn: int, stage: int, microbatch: int, microbatches: int) -> float:
    """The freeze ratio of a microbatch in the ``turn``-th step (from 0) that draws, in [0, 1].

    From turn to turn another microbatch gets a given ratio, so that what is special about the first or the last one
    is not taken for an effect of freezing, and the ratios between the ends move. A single microbatch gets a half:
    each parameter then misses every second of these steps.
    """
    if microbatches == 1:
        return 0.5
    stride = _coprime_stride(microbatches)
    level = (stride * (microbatch + turn) + stage) % microbatches
    shift = (turn * _GOLDEN) % 1.0 / 2.0
    return max(0.0, level - shift) / (microbatches - 1)


def _coprime_stride(count: int) -> int:
    """About 0.6 of ``count``, and coprime to it: neighbours are far apart, and every level occurs once."""
    stride = max(1, round(count * _GOLDEN))
    while math.gcd(stride, count) > 1:
        stride -= 1
    return stride
