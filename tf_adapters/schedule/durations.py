"""How long an action can take, and the numbers that JSON files have: checked where they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

__all__ = ["Bounds", "Count", "Milliseconds", "Quotient", "Share"]

Milliseconds = Annotated[float, Field(ge=0, le=1e15)]  # sums of them are finite, too
# A mean of ratios may exceed 1 by a rounding error, which is no reason to lose a report.
Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6, allow_inf_nan=False)]
Quotient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Bounds:
    """How long an action takes in ms: ``lower`` with all its parameters frozen, ``upper`` with none."""

    lower: float
    upper: float
