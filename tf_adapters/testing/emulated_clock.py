"""The name of a device that is not there, wherever a report names the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tf_adapters.measuring.timer import CLOCKS, Clock

__all__ = ["EmulatedClock", "emulated"]


class EmulatedClock(Clock):
    """This machine's clock, while operations or messages last as long as on a device that is not there."""

    device = "emulated"


@contextmanager
def emulated() -> Iterator[None]:
    """Give whoever attaches from here on, on a CPU, a clock that says so."""
    before = CLOCKS["cpu"]
    CLOCKS["cpu"] = EmulatedClock
    try:
        yield
    finally:
        CLOCKS["cpu"] = before
