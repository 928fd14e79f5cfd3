"""How long actions take: marks on the device's own time line, or on a host clock where there is no device.

Nothing here synchronises inside a step: a device mark is read once the device has passed it.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tf_adapters.ir import Action
from tf_adapters.robust import median


class Clock(Protocol):
    """Marks moments and tells the time between two of them."""

    def mark(self) -> Any:
        """A moment, as seen by the device that runs the work."""

    def elapsed_ms(self, start: Any, stop: Any) -> float | None:
        """Milliseconds between two marks; None while the device has not passed ``stop`` yet."""

    def synchronize(self) -> None:
        """Wait until every mark has been passed."""


class HostClock:
    """For work that is done when the call returns: CPU."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def elapsed_ms(self, start: int, stop: int) -> float:
        return (stop - start) / 1e6

    def synchronize(self) -> None:
        return None


class DeviceClock:
    """Events in the current stream of an accelerator; recording one costs microseconds and waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float | None:
        return float(start.elapsed_time(stop)) if stop.query() else None

    def synchronize(self) -> None:
        self._module.synchronize()


def clock_for(device: torch.device) -> Clock:
    """The clock of the device that the model lives on."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured action. ``share`` is the share of its weight-gradient work that was frozen, in [0, 1]."""

    share: float
    ms: float


class ActionTimer:
    """Collects samples of actions and of whole steps, by phase. Bounded: it keeps the newest ``keep`` of each."""

    def __init__(self, clock: Clock, keep: int = 256) -> None:
        self._clock = clock
        self._pending: deque[tuple[str, Action | None, float, Any, Any]] = deque()
        self._actions: dict[tuple[str, Action], deque[Sample]] = defaultdict(lambda: deque(maxlen=keep))
        self._steps: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=keep))

    @contextmanager
    def timed(self, phase: str, action: Action, share: float) -> Iterator[None]:
        """Time the block as one run of ``action``. A block that raises leaves no sample."""
        start = self._clock.mark()
        yield
        self._pending.append((phase, action, share, start, self._clock.mark()))

    def start_step(self) -> Any:
        return self._clock.mark()

    def stop_step(self, phase: str, start: Any) -> None:
        self._pending.append((phase, None, 0.0, start, self._clock.mark()))

    def drain(self, wait: bool = False) -> None:
        """Turn the marks that the device has passed into samples; with ``wait``, all of them."""
        if wait:
            self._clock.synchronize()
        while self._pending:
            phase, action, share, start, stop = self._pending[0]
            elapsed = self._clock.elapsed_ms(start, stop)
            if elapsed is None:
                return
            self._pending.popleft()
            if action is None:
                self._steps[phase].append(elapsed)
            else:
                self._actions[phase, action].append(Sample(share, elapsed))

    def samples(self, phase: str, action: Action) -> tuple[Sample, ...]:
        return tuple(self._actions.get((phase, action), ()))

    def actions(self, phase: str) -> tuple[Action, ...]:
        return tuple(sorted(action for sampled, action in self._actions if sampled == phase))

    def step_ms(self, phase: str) -> float | None:
        """Median duration of this rank's steps in a phase, ms; None where there is none."""
        return median(self._steps.get(phase, ()))

    def last_step_ms(self, phase: str) -> float | None:
        steps = self._steps.get(phase)
        return steps[-1] if steps else None

    def clear(self) -> None:
        self._pending.clear()
        self._actions.clear()
        self._steps.clear()


def durations_all_frozen(upper_ms: float, samples: Iterable[Sample]) -> list[float]:
    """What each sample says of the duration, ms, with all weight gradients frozen; ``upper_ms`` is with none.

    Where samples with a part of the work frozen exist, each is extended along the line through ``upper_ms`` to a
    share of 1. That matters on a first stage: with everything frozen its backward disappears altogether, far
    below what any random mask can reach.
    """
    usable = [sample for sample in samples if sample.share > 0.0]
    partial = [sample for sample in usable if sample.share < 1.0]
    if partial:
        return [upper_ms - (upper_ms - sample.ms) / sample.share for sample in partial]
    return [sample.ms for sample in usable]
