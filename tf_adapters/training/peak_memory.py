"""A log line about the memory of the fullest rank, in the host's order and in the plan's."""

from __future__ import annotations

from collections.abc import Sequence

from tf_adapters.collectives import decide_from_all
from tf_adapters.measuring.phase import Phase
from tf_adapters.training.batches import BatchPlan
from tf_adapters.training.plan_maker import RunSetup

_Peaks = tuple[int, int]
"""Bytes of a rank in the host's order and in the plan's."""


def peak_memory_line(setup: RunSetup, batch: BatchPlan) -> str | None:
    """Return a log line: memory of the fullest rank in the host's order and in the plan's. None if it is not measured.

    Called on all ranks at the same point.
    """

    def local() -> _Peaks | None:
        held = setup.memory.peak_bytes(Phase.MONITORING_UPPER)
        planned = batch.planned_peak_bytes(setup.memory, min(setup.pipeline.parameters))
        return None if held is None or planned is None else (held, planned)

    def fullest(ranks: Sequence[_Peaks | None]) -> _Peaks | None:
        held, planned = zip(*(rank for rank in ranks if rank), strict=True) if any(ranks) else ((), ())
        return (max(held), max(planned)) if held else None

    peaks = decide_from_all(setup.collectives, local, fullest)
    if peaks is None:
        return None
    held, planned = (f"{peak / 2**20:,.1f} MiB" for peak in peaks)
    return f"memory of the fullest rank: {held} now, at most {planned} planned; messages in transit come on top"
