"""Clocks that stand still until a test moves them, and a timer on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tf_adapters.measuring.freeze_response import StageTimes, measured_times
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.timer import CLOCKS, ActionTimer
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action
from tf_adapters.testing.emulated_device import EmulatedDevice

BACKWARD = Action.parse("1B0")


class FakeClock:
    """Time stands still until the test moves it; the device has passed the marks up to ``reached``."""

    device = "cpu"

    def __init__(self, reached: float = float("inf")) -> None:
        self.now = 0.0
        self.reached = reached
        self.waits = 0

    def mark(self) -> float:
        return self.now

    def elapsed_ms(self, start: Any, stop: Any) -> float | None:
        return stop - start if stop <= self.reached else None

    def synchronize(self) -> None:
        self.waits += 1
        self.reached = float("inf")


class Filled:
    """A timer with samples of our choice."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.timer = ActionTimer(self.clock)
        self._in_step: set[Action] = set()

    def add(self, phase: Phase, action: Action, share: float, ms: float) -> None:
        """Add a sample. An action that has one in this step begins another step."""
        if action in self._in_step:
            self.timer.start_step()
            self._in_step.clear()
        self._in_step.add(action)
        with self.timer.timed(phase, action, share):
            self.clock.now += ms
        self.timer.drain()

    def times(self) -> StageTimes:
        return measured_times(self.timer, first_stage=0)

    def bounds(self, action: Action = BACKWARD) -> Bounds:
        return self.times().bounds()[action]


@dataclass
class Time:
    """A clock that only sleeping moves, and by how much longer than asked each sleep lasts."""

    now: float = 0.0
    oversleep: float = 0.0
    computed: float = 0.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.oversleep

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def device(self, rate: float, **more: object) -> EmulatedDevice:
        return EmulatedDevice(rate, clock=lambda: self.now, sleep=self.sleep, busy=lambda: self.computed, **more)


class _Counted(FakeClock):
    """The clock of a ``Time``, in ms."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self._time = time

    def mark(self) -> float:
        return self._time.now * 1e3


@contextmanager
def counted_time(rate: float = 1e6) -> Iterator[None]:
    """On this rank time passes by the FLOPs of operations alone, so a busy machine does not change what is measured.

    ``rate`` is in FLOP/s. Nothing sleeps.
    """
    time = Time()
    with time.device(rate), mock.patch.dict(CLOCKS, cpu=lambda: _Counted(time)):
        yield
