"""How much memory a rank holds while it trains, as its own allocator or the system counts it.

Peaks are seen from outside: at the ends of forwards and backwards. Allocators keep peaks of their own, but they are the
host's to reset and to log.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tf_adapters.timing.device import device_name

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryMeter"]

_STEPS = 4
"""Steps of a phase that are looked at: an allocator's counters take longer to read than a clock, and do not vary."""

_STATM = Path("/proc/self/statm")


class MemoryMeter:
    """The most bytes that were held in each phase; nothing where neither device nor system tells.

    On an accelerator these are bytes of tensors. A CPU has no such count: there they are the whole process's, which
    includes what allocators keep and rises slowly whatever freezing spares.
    """

    def __init__(self, device: torch.device) -> None:
        self.device_type = device_name(device)
        self._held = _reader(device)
        self._peaks: dict[str, int] = {}
        self._steps: dict[str, int] = defaultdict(int)

    def look(self, phase: str) -> None:
        """At the end of an action."""
        if self._held is not None and self._steps[phase] < _STEPS:
            self._peaks[phase] = max(self._held(), self._peaks.get(phase, 0))

    def stop_step(self, phase: str) -> None:
        """A step of ``phase`` has ended."""
        self._steps[phase] += 1

    def peak_bytes(self, phase: str) -> int | None:
        """None where nothing was seen."""
        return self._peaks.get(phase)

    def clear(self) -> None:
        """Forget everything."""
        self._peaks.clear()
        self._steps.clear()


def _reader(device: torch.device) -> Callable[[], int] | None:
    """Bytes of tensors on an accelerator; on a CPU, where tensors have no allocator of their own, of the process."""
    if device.type != "cpu":
        import torch

        allocated = getattr(torch.get_device_module(device), "memory_allocated", None)
        return None if allocated is None else lambda: int(allocated(device))
    if not _STATM.exists():
        return None
    page = resource.getpagesize()
    return lambda: int(_STATM.read_text(encoding="ascii").split()[1]) * page
