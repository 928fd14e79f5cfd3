"""Measure the memory of a rank in training, and predict it for another order of its actions.

Bytes are read at the ends of forwards and backwards. The peak counters of allocators are not used, because the host may
reset and log them.
"""

from __future__ import annotations

import ctypes
import resource
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tf_adapters.measuring.timer import device_function
from tf_adapters.schedule.deferral import first_half
from tf_adapters.schedule.ir import Action, Kind

if TYPE_CHECKING:
    import torch

_STEPS = 4
"""Number of steps of a phase that are measured. Counters are slower to read than a clock, and hardly vary."""

_SHARE_OF_DEVICE = 0.9
"""Share of a device's memory that tensors may fill. The rest is for gaps between them and for other libraries."""

_STATM = Path("/proc/self/statm")

_Holdings = tuple[Counter[int], Counter[int], frozenset[int]]
"""Numbers of microbatches in flight and of waiting weight gradients by stage, and the stages with gradients."""


@dataclass(frozen=True)
class HeldMemory:
    """The memory of a rank with nothing frozen, in bytes.

    Attributes:
        base: memory between batches: weights, optimizer state and the like. It includes the largest error of the fit,
            so that no measured value is above the model.
        in_flight: by stage, memory of a microbatch from its forward to the end of its input gradient.
        waiting: by stage, memory of a microbatch from then until its weight gradients are computed.
        gradients: by stage, memory of all weight gradients from the first one on.
        sent: by stage, sent tensors of a microbatch that stay from its input gradient to the end of the batch. The
            measured order does not keep them.
        batch: number of microbatches of the measured batches.
    """

    base: float
    in_flight: Mapping[int, float]
    waiting: Mapping[int, float]
    gradients: Mapping[int, float]
    sent: Mapping[int, float] = field(default_factory=dict)
    batch: int = 0

    def peak_bytes(self, row: Iterable[Action]) -> int:
        """Return the peak over the ends of these actions, in bytes, if the rank runs them in this order."""
        most = self.base
        kept = 0.0
        actions = tuple(row)
        for action, (in_flight, waiting, having) in zip(actions, _holdings(actions), strict=True):
            if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
                kept += self.sent.get(action.stage, 0.0)
            held = kept + sum(self.in_flight.get(stage, 0.0) * count for stage, count in in_flight.items())
            held += sum(self.waiting.get(stage, 0.0) * count for stage, count in waiting.items())
            held += sum(self.gradients.get(stage, 0.0) for stage in having)
            most = max(most, self.base + held)
        return round(most)

    def most_microbatches(self, limit_bytes: float) -> int:
        """Return how many microbatches, each of the stage that holds most, this rank can hold within a limit."""
        left = limit_bytes - self.needed_bytes(0)
        return max(0, int(left // self._of_one)) if self._of_one > 0.0 else 0

    def needed_bytes(self, microbatches: int) -> float:
        """Return the bytes with this many microbatches, each of the stage that holds most, and with all gradients."""
        sent = self.batch * sum(self.sent.values())
        return self.base + sum(self.gradients.values()) + sent + microbatches * self._of_one

    @property
    def _of_one(self) -> float:
        return max(max(self.in_flight[stage], self.waiting[stage]) for stage in self.in_flight)


class _Sample(NamedTuple):
    """The bytes that a rank held at the end of an action."""

    action: Action
    held: int


class MemoryMeter:
    """Measures the peak memory of each phase, in bytes. Without a counter it measures nothing.

    On an accelerator it counts bytes of tensors. On a CPU tensors have no separate allocator, so it counts the C
    library's allocated bytes, or else the resident memory of the process. ``sent_bytes`` is
    ``HostPipeline.sent_bytes``.
    """

    def __init__(self, device: torch.device, sent_bytes: Mapping[tuple[int, Kind], int] | None = None) -> None:
        self._device, self._held = device, _reader(device)
        self._sent_bytes = {} if sent_bytes is None else sent_bytes
        self.clear()

    def clear(self) -> None:
        self._peaks: dict[str, int] = {}
        self._steps = Counter[str]()
        self._ran: list[_Sample] = []  # of the current step
        self._samples: dict[str, list[list[_Sample]]] = defaultdict(list)

    def start_step(self) -> None:
        """Begin a step, and drop the measurements of an unfinished one."""
        self._ran = []

    def look(self, phase: str, action: Action) -> None:
        """Read the memory at the end of ``action``, which may also be the first half (INPUT_GRAD) of a BACKWARD."""
        if self._held is None or self._steps[phase] >= _STEPS:
            return
        self._ran.append(_Sample(action, self._held()))

    def stop_step(self, phase: str) -> None:
        self._steps[phase] += 1
        if not self._ran:
            return
        whole = {first_half(ran.action) for ran in self._ran if ran.action.kind is Kind.BACKWARD}
        ends = [ran.held for ran in self._ran if ran.action not in whole]
        self._peaks[phase] = max(*ends, self._peaks.get(phase, 0))
        self._samples[phase].append(self._ran)
        self._ran = []

    def peak_bytes(self, phase: str) -> int | None:
        """Peak memory of a phase in bytes; None if it was not measured."""
        return self._peaks.get(phase)

    def held(self, phase: str) -> HeldMemory | None:
        """Fit the memory model to a phase by least squares; None if it was not measured."""
        steps = self._samples.get(phase)
        if not steps:
            return None
        stages = sorted({ran.action.stage for ran in steps[0]})
        rows = [
            [1.0, *(count[s] for count in (in_flight, waiting) for s in stages), *(float(s in having) for s in stages)]
            for step in steps
            for in_flight, waiting, having in _holdings(ran.action for ran in step)
        ]
        known, seen = np.array(rows, float), np.array([ran.held for step in steps for ran in step], float)
        fitted = np.linalg.lstsq(known, seen, rcond=None)[0]
        base, *of_stages = fitted.tolist()
        base += float(max(seen - known @ fitted))
        in_flight, waiting, gradients = (
            dict(zip(stages, of_stages[start : start + len(stages)], strict=True))
            for start in range(0, 3 * len(stages), len(stages))
        )
        sent = Counter[int]()
        for (stage, _), size in self._sent_bytes.items():
            sent[stage] += size
        batch = len({ran.action.microbatch for ran in steps[-1]})
        return HeldMemory(base, in_flight, waiting=waiting, gradients=gradients, sent=sent, batch=batch)

    def most_microbatches(self, phase: str, limit_bytes: float | None, own: int) -> int | None:
        """Return how many microbatches this rank can hold, as measured in a phase; None if that is not known.

        ``limit_bytes`` is the memory that tensors may fill. None stands for 90% of the memory that the device has for
        them. Memory can be higher during an action than at its end. If the device has counted that difference, it is
        left free. The phase held up to ``own`` microbatches, which fit if its peak was within ``limit_bytes``.
        """
        held, limit = self.held(phase), limit_bytes or _capacity_bytes(self._device)
        if held is None or limit is None:
            return None
        fitting = held.most_microbatches(limit - self._inside)
        own_fits = limit_bytes is None or self._peaks[phase] + self._inside <= limit_bytes
        return max(fitting, own) if own_fits else fitting

    def needed_bytes(self, phase: str, microbatches: int) -> float | None:
        """Return the smallest limit with which ``most_microbatches`` says at least this number."""
        held = self.held(phase)
        return None if held is None else held.needed_bytes(microbatches) + self._inside

    @property
    def _inside(self) -> int:
        """Bytes that an action needs only while it runs, as far as the device has counted them."""
        return max(0, _most_allocated(self._device) - max(self._peaks.values()))


def _capacity_bytes(device: torch.device) -> float | None:
    """Return what tensors of this process may fill on an accelerator; None on a CPU, whose memory others share."""
    free_and_total, reserved = (device_function(device, name) for name in ("mem_get_info", "memory_reserved"))
    if free_and_total is None or reserved is None:
        return None
    return _SHARE_OF_DEVICE * float(free_and_total(device)[0] + reserved(device))


def _most_allocated(device: torch.device) -> int:
    """Return the most bytes that tensors have filled on an accelerator; 0 if nobody has counted."""
    count = device_function(device, "max_memory_allocated")
    return int(count(device)) if count else 0


def _holdings(row: Iterable[Action]) -> Iterator[_Holdings]:
    in_flight, waiting, having = Counter[int](), Counter[int](), set[int]()
    ran = set[Action]()
    for action in row:
        ran.add(action)
        stage, split = action.stage, first_half(action) in ran
        if action.kind is Kind.FORWARD:
            in_flight[stage] += 1
        elif action.kind is Kind.INPUT_GRAD:
            in_flight[stage] -= 1
            waiting[stage] += 1
        elif action.kind is Kind.BACKWARD and not split:
            in_flight[stage] -= 1
        else:
            waiting[stage] -= 1
        if action.freezable:
            having.add(stage)
        yield Counter(in_flight), Counter(waiting), frozenset(having)


def _reader(device: torch.device) -> Callable[[], int] | None:
    """Return a reader: bytes of tensors on an accelerator; on a CPU the C library's heap, or else the process."""
    if device.type == "cpu":
        return _heap_reader() or _resident_reader()
    allocated = device_function(device, "memory_allocated")
    return None if allocated is None else lambda: int(allocated(device))


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2`` (malloc.h, since 2.33)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def _heap_reader() -> Callable[[], int] | None:
    """Return a reader of glibc's allocated bytes (main heap and mmapped blocks); None with another C library."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return None
    read.restype = _MallocInfo

    def held() -> int:
        info = read()
        return int(info.uordblks + info.hblkhd)

    return held


def _resident_reader() -> Callable[[], int] | None:
    if not _STATM.exists():
        return None
    page = resource.getpagesize()
    return lambda: int(_STATM.read_text(encoding="ascii").split()[1]) * page
