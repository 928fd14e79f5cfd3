"""One rank's times as arrays, so that a message with thousands of actions has tens of kilobytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from tf_adapters.measuring.timer import Interval, Trace
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule


@dataclass(frozen=True, slots=True)
class PackedBounds:
    """Bounds of some actions of a schedule. Times are rounded to float32.

    Attributes:
        actions: int32, differences between successive indices into ``schedule.actions``.
        upper: float32, time in ms with nothing frozen.
        saved: float32, time in ms that full freezing saves.
    """

    actions: bytes
    upper: bytes
    saved: bytes

    @classmethod
    def of(cls, schedule: PipelineSchedule, bounds: Mapping[Action, Bounds]) -> PackedBounds:
        chosen = [(index, bounds[action]) for index, action in enumerate(schedule.actions) if action in bounds]
        upper = [of_action.upper for _, of_action in chosen]
        saved = [of_action.upper - of_action.lower for _, of_action in chosen]
        steps = np.diff([index for index, _ in chosen], prepend=0)
        return cls(steps.astype(np.int32).tobytes(), _floats(upper).tobytes(), _floats(saved).tobytes())

    def unpack(self, schedule: PipelineSchedule) -> dict[Action, Bounds]:
        actions = schedule.actions
        indices = np.cumsum(np.frombuffer(self.actions, np.int32))
        upper = np.frombuffer(self.upper, np.float32).astype(np.float64)
        lower = upper - np.frombuffer(self.saved, np.float32)
        pairs = zip(indices, lower.tolist(), upper.tolist(), strict=True)
        return {actions[index]: Bounds(low, high) for index, low, high in pairs}


@dataclass(frozen=True, slots=True)
class PackedTraces:
    """Steps of one rank, all with the same actions. Times are rounded to float32.

    Attributes:
        steps: the steps' numbers.
        actions: int32, indices into ``schedule.actions``.
        ms: float32 of shape (steps, 2, actions): start and end of actions, since the rank's step began.
        until_next: float32, the time in ms from the beginning of each step to that of the next; NaN where not known.
    """

    steps: tuple[int, ...] = ()
    actions: bytes = b""
    ms: bytes = b""
    until_next: bytes = b""

    @classmethod
    def of(
        cls,
        schedule: PipelineSchedule,
        traces: Sequence[tuple[int, Trace]],
        until_next: Mapping[int, float] = MappingProxyType({}),
    ) -> PackedTraces:
        """Pack the steps that have the same actions as the newest one. Other steps are incomplete."""
        if not traces:
            return cls()
        index = {action: number for number, action in enumerate(schedule.actions)}
        actions = [action for action in traces[-1][1] if action in index]
        whole = [(number, trace) for number, trace in traces if trace.keys() == traces[-1][1].keys()]
        ms = [[[t[a].start_ms for a in actions], [t[a].end_ms for a in actions]] for _, t in whole]
        indices = np.array([index[action] for action in actions], dtype=np.int32)
        numbers = tuple(number for number, _ in whole)
        following = [until_next.get(number, math.nan) for number in numbers]
        return cls(numbers, indices.tobytes(), ms=_floats(ms).tobytes(), until_next=_floats(following).tobytes())

    def unpack(self, schedule: PipelineSchedule) -> list[tuple[int, Trace]]:
        """Return the steps with their numbers, in order."""
        every = schedule.actions
        actions = [every[index] for index in np.frombuffer(self.actions, np.int32)]
        ms = np.frombuffer(self.ms, np.float32).astype(np.float64).reshape(len(self.steps), 2, len(actions))
        return [
            (number, {a: Interval(*span) for a, span in zip(actions, spans.T.tolist(), strict=True)})
            for number, spans in zip(self.steps, ms, strict=True)
        ]

    def rank(self, schedule: PipelineSchedule) -> int:
        """Return the pipeline rank that ran the actions. There must be a step."""
        return schedule.home[schedule.actions[int(np.frombuffer(self.actions, np.int32)[0])].stage]

    def unpack_until_next(self) -> dict[int, float]:
        """Return the time in ms from the beginning of each step to that of the next, by number, if known."""
        following = np.frombuffer(self.until_next, np.float32).tolist()
        return {number: ms for number, ms in zip(self.steps, following, strict=True) if not math.isnan(ms)}


def _floats(values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(values, dtype=np.float32)
