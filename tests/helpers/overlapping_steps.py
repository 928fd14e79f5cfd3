"""Settings of exact deferral for tests of steps that overlap, and what these tests say of the log on every host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OVERLAPPING = {
    "weight_gradients": "deferred",
    "max_freeze_ratio": 0.0,
    "extra_microbatches": 4,
    "monitoring_steps": 8,
    "progressive_steps": 0,
    "replan_threshold": 0.0,
    "replan_interval": 1000,
}
"""Exact deferral that begins after eight measured steps and keeps its plan."""


def assert_ranks_overlap(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Every rank has the same plan, whose steps overlap and are shorter than the host's."""
    for rank in ranks:
        assert rank["failure"] is None
        assert rank["known"].steps == "overlap"
        assert rank["plan"].period_ms.planned < rank["plan"].period_ms.host
        assert rank["plan"] == ranks[0]["plan"]
    assert any("ranks do not meet between steps" in line for line in ranks[0]["log"])


def assert_ranks_meet(ranks: Sequence[Mapping[str, Any]], reason: str) -> None:
    """Every rank knows that ranks meet, and the log names ``reason`` if the measured cost is worth a line."""
    assert [rank["known"].steps for rank in ranks] == ["meet"] * len(ranks)
    assert ranks[0]["meetings"] == (reason,)
    for line in ranks[0]["log"]:
        if "all ranks meet between steps" in line:
            assert line.endswith(f"what makes them meet: {reason}")
