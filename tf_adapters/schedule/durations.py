"""Bounds of an action's duration, and number types for JSON files, which are checked when read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

__all__ = ["Bounds", "Count", "Milliseconds", "Quotient", "Share"]

Milliseconds = Annotated[float, Field(ge=0, le=1e15)]  # so that sums are finite
# A rounding error may put a mean of ratios above 1. The report is still valid.
Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6, allow_inf_nan=False)]
Quotient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Bounds:
    """Duration of an action in ms: ``lower`` with all parameters frozen, ``upper`` with no parameter frozen."""

    lower: float
    upper: float
