"""How long an action can take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bounds"]


@dataclass(frozen=True)
class Bounds:
    """How long an action takes in ms: ``lower`` with all its parameters frozen, ``upper`` with none."""

    lower: float
    upper: float
