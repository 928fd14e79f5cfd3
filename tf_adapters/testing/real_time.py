"""This process before the others of the machine, so that what else runs there hardly delays it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["real_time"]


@contextmanager
def real_time() -> Iterator[bool]:
    """Run this process's threads, and those that they start inside, at a real-time priority (``sched(7)``).

    For processes that sleep most of the time, such as ranks on emulated devices: one that computes without end would
    leave other processes little of its core. Yields whether the system allowed it; root may. Afterwards the threads
    have the ordinary priority.
    """
    allowed = _schedule("SCHED_RR", priority=1)
    try:
        yield allowed
    finally:
        if allowed:
            _schedule("SCHED_OTHER", priority=0)


def _schedule(policy: str, priority: int) -> bool:
    if not hasattr(os, policy):
        return False
    try:
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(priority))
    except OSError:
        return False
    return True
