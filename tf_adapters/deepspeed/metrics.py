"""Figures of a run in the engine's monitor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_adapters.report.observer import MetricSink

__all__ = ["also_to_monitor"]


def also_to_monitor(engine: Any, given: MetricSink | None) -> MetricSink:
    """Return a function that sends figures to the engine's monitor, and to the ``given`` function."""

    def write(figures: Mapping[str, float]) -> None:
        samples = engine.global_samples
        engine.monitor.write_events([(f"TimelyFreeze/{name}", value, samples) for name, value in figures.items()])
        if given is not None:
            given(figures)

    return write
