"""Time actions by marks in the device's stream, or by the host clock on a CPU.

It never synchronises inside a step: a device mark is read after the device has passed it.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tf_adapters.config import SECTION
from tf_adapters.errors import ConfigError
from tf_adapters.measuring.control_steps import ControlPairs
from tf_adapters.measuring.estimates import median
from tf_adapters.measuring.phase import Phase
from tf_adapters.schedule.ir import Action

if TYPE_CHECKING:
    import torch


class Clock:
    """Marks moments and measures the time between two marks.

    This class reads the host's clock. On a CPU that is enough: the work is done when the call returns.
    """

    device = "cpu"
    """The device's name in reports."""

    def mark(self) -> Any:
        """Return a mark of the current moment on the device that runs the work."""
        return time.perf_counter_ns()

    def elapsed_ms(self, start: Any, stop: Any) -> float | None:
        """Return the time between two marks in ms; None if the device has not yet passed ``stop``."""
        return (stop - start) / 1e6  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Wait until every mark has been passed."""


class DeviceClock(Clock):
    """Events in the current stream of one accelerator. Recording an event takes microseconds and does not wait.

    The process's current device may be another one if the host names the stage's device in every call.
    """

    def __init__(self, device: torch.device) -> None:
        import torch  # the command line reads traces without torch

        self._module = torch.get_device_module(device)
        index = self._module.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self.device = device.type

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float | None:
        return float(start.elapsed_time(stop)) if stop.query() else None

    def synchronize(self) -> None:
        self._module.synchronize(self._device)


CLOCKS: dict[str, Callable[[], Clock]] = {"cpu": Clock}
"""Clocks by type of device. A device that is not named here needs the streams and events of DeviceClock."""


def clock_for(device: torch.device) -> Clock:
    return CLOCKS[device.type]() if device.type in CLOCKS else DeviceClock(device)


def device_function(device: torch.device, name: str) -> Callable[..., Any] | None:
    """Return a function of torch's module for an accelerator, such as ``torch.cuda``; None on a CPU or without it."""
    if device.type == "cpu":
        return None
    import torch

    return getattr(torch.get_device_module(device), name, None)


def is_capturing(device: torch.device) -> bool:
    """Return whether the device's current stream is capturing a graph, which fixes a step for ever."""
    ask = device_function(device, "is_current_stream_capturing")
    return ask is not None and bool(ask())


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured action. ``share`` is the frozen share of its freezable work (``units.frozen_share``).

    ``step`` counts this rank's timed steps. ``microbatches`` is the number in the step. ``first_part`` is the share of
    the time until a backward's input gradients were done, in [0, 1]; None without weight gradients apart.
    """

    share: float
    ms: float
    step: int = 0
    microbatches: int = 0
    first_part: float | None = None


class _Step(NamedTuple):
    """A timed step: the mark of its start, the number of earlier steps, and its number of microbatches."""

    origin: Any = None
    ordinal: int = 0
    microbatches: int = 0


class _Marked(NamedTuple):
    """Two marks, and the function that takes the ms between them once the device has passed both."""

    start: Any
    stop: Any
    use: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Interval:
    """Start and end of an action, in ms since its rank's step began."""

    start_ms: float
    end_ms: float


Trace = Mapping[Action, Interval]
"""The intervals of one step of one rank."""

_TRACES = 32


class ActionTimer:
    """Collects samples of actions and of whole steps, by phase. It keeps the newest ``keep`` of each.

    It also keeps the traces of the newest 32 steps. With ``microbatches``, a query uses only steps with that number of
    microbatches; without it, all steps.
    """

    def __init__(self, clock: Clock, keep: int = 256) -> None:
        self._clock, self._keep = clock, keep
        self.controls = ControlPairs()
        self._step = _Step()
        self._inputs_done: Any = None  # the mark, in the action that runs
        self.clear()

    def clear(self) -> None:
        """Drop all samples. Steps are counted on."""
        keep = self._keep
        self.controls.clear()
        self._pending: deque[_Marked] = deque()
        self._actions: dict[tuple[str, Action], deque[Sample]] = defaultdict(lambda: deque(maxlen=keep))
        self._steps: dict[str, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=keep))
        self.newest_step_ms: float | None = None
        """Duration of the newest step that has been drained, ms."""
        self._trace: dict[Action, Interval] = {}
        self._traces: dict[tuple[str, int], deque[tuple[int, Trace]]] = defaultdict(lambda: deque(maxlen=_TRACES))
        self._ended: tuple[int, Any] | None = None  # number of the newest step, and the mark of its beginning
        self._until_next: deque[tuple[int, float]] = deque(maxlen=2 * _TRACES)

    @property
    def device(self) -> str:
        return self._clock.device

    @contextmanager
    def timed(self, phase: str, action: Action, share: float = 0.0) -> Iterator[None]:
        """Time the block as one run of ``action``. A block that raises leaves no sample."""
        start, self._inputs_done = self._clock.mark(), None
        yield
        stop, step, inputs_done = self._clock.mark(), self._step, self._inputs_done

        def add(ms: float) -> None:
            inputs_ms = None if inputs_done is None else self._clock.elapsed_ms(start, inputs_done)
            first_part = inputs_ms / ms if inputs_ms is not None and ms > 0.0 else None
            sample = Sample(share, ms, step.ordinal, step.microbatches, first_part=first_part)
            self._actions[phase, action].append(sample)
            if step.origin is not None:
                begin = self._clock.elapsed_ms(step.origin, start) or 0.0
                self._trace[action] = Interval(begin, begin + ms)

        self._pending.append(_Marked(start, stop, add))

    def input_gradients_done(self) -> None:
        """From here to its end, the action that is being timed computes weight gradients."""
        self._inputs_done = self._clock.mark()

    def start_step(self, microbatches: int = 0) -> Any:
        begin = self._clock.mark()
        if self._ended is not None:
            number, start = self._ended
            self._pending.append(_Marked(start, begin, lambda ms: self._until_next.append((number, ms))))
            self._ended = None
        self._step = _Step(begin, self._step.ordinal + 1, microbatches)
        return begin

    def stop_step(self, phase: str, start: Any, step: int) -> None:
        """Note that step number ``step``, the same on all ranks, has ended."""
        microbatches = self._step.microbatches

        def add(ms: float) -> None:
            self._steps[phase].append((microbatches, ms))
            if phase in (Phase.STABLE, Phase.CONTROL):
                self.controls.add(step, microbatches, ms, is_control=phase == Phase.CONTROL)
            self.newest_step_ms = ms
            self._traces[phase, microbatches].append((step, self._trace))
            self._trace = {}

        self._pending.append(_Marked(start, self._clock.mark(), add))
        self._ended = step, start
        self._step = self._step._replace(origin=None)

    def drain(self, wait: bool = False) -> None:
        """Turn marks that the device has passed into samples; with ``wait``, all marks."""
        if wait:
            self._clock.synchronize()
        while self._pending:
            start, stop, use = self._pending[0]
            elapsed_ms = self._clock.elapsed_ms(start, stop)
            if elapsed_ms is None:
                return
            self._pending.popleft()
            use(elapsed_ms)

    def samples(self, phase: str, action: Action, microbatches: int | None = None) -> tuple[Sample, ...]:
        every = self._actions.get((phase, action), ())
        return tuple(sample for sample in every if microbatches in (None, sample.microbatches))

    def first_parts(self, phase: str, action: Action) -> tuple[float, ...]:
        """The newest first parts of an action as shares of its time, in order."""
        return tuple(part for sample in self.samples(phase, action) if (part := sample.first_part) is not None)

    def actions(self, phase: str) -> tuple[Action, ...]:
        return tuple(sorted(action for sampled, action in self._actions if sampled == phase))

    def traces(self, phase: str, microbatches: int) -> tuple[tuple[int, Trace], ...]:
        """Return the newest steps of a phase with their numbers. Ranks may have drained different numbers of steps."""
        return tuple(self._traces.get((phase, microbatches), ()))

    def until_next(self) -> dict[int, float]:
        """Return the ms from the beginning of each of this rank's newest steps to that of the next, by number."""
        return dict(self._until_next)

    def step_ms(self, phase: str, microbatches: int | None = None) -> float | None:
        """Median duration of this rank's steps in a phase, ms; None without steps."""
        return median(self.steps_ms(phase, microbatches))

    def steps_ms(self, phase: str, microbatches: int | None = None) -> tuple[float, ...]:
        """Durations of this rank's newest steps in a phase, ms, in order."""
        return tuple(ms for number, ms in self._steps.get(phase, ()) if microbatches in (None, number))


class NvtxTimer(ActionTimer):
    """A timer that also makes each action an NVTX range: "F 3 stage 1" is the forward of microbatch 3 on stage 1."""

    def __init__(self, clock: Clock, keep: int = 256) -> None:
        """Raise ConfigError if the clock's device is not CUDA, whose library NVTX ranges belong to."""
        if clock.device != "cuda":
            raise ConfigError(f"{SECTION}.nvtx is true: allowed is false here; NVTX is for CUDA, not {clock.device}")
        super().__init__(clock, keep)

    @contextmanager
    def timed(self, phase: str, action: Action, share: float = 0.0) -> Iterator[None]:
        import torch

        name = f"{action.kind.value} {action.microbatch} stage {action.stage}"
        with torch.cuda.nvtx.range(name), super().timed(phase, action, share):
            yield
