"""Emulate a device: each operation lasts as long as its FLOPs would take, and the process sleeps for that time.

A pipeline's makespan depends on the durations of actions, not on their values. With tiny layers and a low rate, the
real engine can run more ranks than the machine has cores. For example: ::

    torchrun --nproc-per-node 4 -m tf_adapters.testing.emulated_device --rate 2e8 -m my_package.train --layers 8

It counts the operations that torch's FLOP counter knows (matrix products, convolutions, attention), forward and
backward. The machine's own work between two operations is hidden up to 10 ms, as an asynchronous device hides launches.
Work beyond that takes real time. ``--link`` emulates the speed of links between ranks (``emulated_link``). Reports call
the device "emulated".
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tf_adapters.errors import ConfigError
from tf_adapters.hosts.launcher import run_command
from tf_adapters.log import announce
from tf_adapters.measuring.timer import CLOCKS
from tf_adapters.testing.emulated_link import EmulatedClock, EmulatedLinks, Link

__all__ = ["EmulatedDevice", "main", "real_time"]

_MOST_HIDDEN_S = 1e-2
"""The most delay, in s, that the next operation compensates: lateness of an operation, and work before the next one.

A draw of tokens computes for one to three ms here, with several ranks on a core."""

_KEEPS_UP = 0.05
"""A warning is logged if operations are late by more than this share of the emulated time."""


class EmulatedDevice(TorchDispatchMode):
    """Makes the operations of a thread last at least ``FLOPs / rate`` seconds while it is active on the thread.

    Args:
        rate: FLOP/s, above 0.
        jitter: standard deviation / mean of an operation's duration, in [0, 1).
        jitter_ms: for how much work, in ms without jitter, the device keeps a speed; by default for an operation.
        seed: seed of the jitter.
        real_time: run as in ``real_time`` below, if the system allows it.
        clock, sleep, busy: functions for time, waiting, and CPU time of this thread, in seconds.

    Attributes:
        asked_s: emulated duration of all operations.
        late_s: their additional real duration: the processor was slower than the device, or woke up late.
        operations: number of counted operations.
    """

    def __init__(
        self,
        rate: float,
        *,
        jitter: float = 0.0,
        jitter_ms: float = 0.0,
        seed: int = 0,
        real_time: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        busy: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if not rate > 0.0:
            raise ConfigError(f"rate is {rate}: allowed is a number of FLOP/s above 0")
        if not 0.0 <= jitter < 1.0:
            raise ConfigError(f"jitter is {jitter}: allowed is a number from 0 to below 1")
        if not 0.0 <= jitter_ms < math.inf:
            raise ConfigError(f"jitter_ms is {jitter_ms}: allowed is a number of ms from 0")
        self.rate, self.jitter, self._real_time = rate, jitter, real_time
        self._jitter_s, self._slowness, self._work_left_s = jitter_ms / 1e3, 1.0, 0.0
        self.asked_s = self.late_s = 0.0
        self.operations = 0
        self._flops: dict[Any, float] = {}
        self._random = random.Random(seed)
        self._clock, self._sleep, self._busy = clock, sleep, busy
        self._overslept = 0.0
        self._busy_until = 0.0  # end of the last operation, in CPU time
        self._active = ExitStack()

    def __enter__(self) -> EmulatedDevice:
        self._active.enter_context(patch.dict(CLOCKS, cpu=EmulatedClock))
        if self._real_time:
            self._active.enter_context(real_time())
        self._busy_until = self._busy()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._active.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            return func(*args, **kwargs)
        began, before = self._clock(), self._busy() - self._busy_until
        out = func(*args, **kwargs)
        sizes = (func, *map(_size, args), *((name, _size(value)) for name, value in kwargs.items()))
        flops = self._flops.get(sizes)
        if flops is None:  # counting is slower than a small product
            flops = self._flops[sizes] = float(count(*args, **kwargs, out_val=out))
        hidden = min(self._overslept + max(0.0, before), _MOST_HIDDEN_S)
        self._wait(began - hidden, flops / self.rate)
        self._busy_until = self._busy()
        return out

    @property
    def error(self) -> float:
        """Additional real duration of operations, as a share of the emulated time."""
        return self.late_s / self.asked_s if self.asked_s else 0.0

    def summary(self) -> str:
        """Return one line on the accuracy of the emulation."""
        line = (
            f"emulated device: {self.operations:,} operations of {self.asked_s:.2f} s at {self.rate:.3g} FLOP/s, "
            f"{self.error:+.2%} off"
        )
        return line if self.error <= _KEEPS_UP else f"{line}: this machine could not keep up; take a lower rate"

    def _drawn_slowness(self, duration: float) -> float:
        """Return the factor of an operation. It is drawn by work, not by time, so that the mean duration stays."""
        if self._work_left_s <= 0.0:
            self._slowness, self._work_left_s = max(0.0, self._random.gauss(1.0, self.jitter)), self._jitter_s
        self._work_left_s -= duration
        return self._slowness

    def _wait(self, began: float, duration: float) -> None:
        """Sleep for the rest of an operation that began at ``began``."""
        if self.jitter:
            duration *= self._drawn_slowness(duration)
        until = began + duration
        if (left := until - self._clock()) > 0.0:
            self._sleep(left)
        overslept = self._clock() - until
        self._overslept = min(overslept, _MOST_HIDDEN_S)
        self.asked_s += duration
        self.late_s += overslept - self._overslept
        self.operations += 1


def _size(value: Any) -> Any:
    """Return a hashable value that determines an argument's part in the FLOPs."""
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(map(_size, value)) if isinstance(value, (list, tuple)) else value


@contextmanager
def real_time() -> Iterator[bool]:
    """Run this process's threads, and those that they start inside, at a real-time priority (``sched(7)``).

    It is for processes that mostly sleep, such as ranks on emulated devices. A process that computes all the time would
    leave little of its core to others. Yields whether the system allowed it (root may). On exit the threads get the
    ordinary priority.
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script or module, unmodified, on an emulated device."""
    options = parse(sys.argv[1:] if arguments is None else list(arguments))
    rank = int(os.environ.get("RANK", "0"))
    device = EmulatedDevice(
        options.rate[rank % len(options.rate)],
        jitter=options.jitter,
        jitter_ms=options.jitter_ms,
        seed=options.seed + rank,
        real_time=options.real_time,
    )
    edges = dict(options.link)
    links = EmulatedLinks(edges.pop(None, None), edges) if edges else None
    try:
        with device, links or nullcontext():
            run_command(options.command)
    finally:
        announce(rank, device.summary())
        if links is not None:
            announce(rank, links.summary())


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the options and the command. Exits with status 2 for wrong options."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_adapters.testing.emulated_device",
        usage="%(prog)s --rate FLOPS [--jitter SHARE] [--jitter-ms MS] [--seed N] [--link LINK ...] [--real-time] "
        "(-m MODULE | SCRIPT) ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", type=_rates, required=True, help="FLOP/s; several with commas, one for each rank")
    parser.add_argument("--jitter", type=float, default=0.0, help="standard deviation of durations, as a share (0)")
    parser.add_argument(
        "--jitter-ms", type=float, default=0.0, help="for how much work a speed lasts (0: an operation)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the jitter (0)")
    parser.add_argument(
        "--link",
        type=_link,
        action="append",
        default=[],
        metavar="[RANK-RANK=]MS[:BYTES_PER_S]",
        help="latency and rate between two ranks, both ways, or between all that have no other; may be repeated",
    )
    parser.add_argument(
        "--real-time", action="store_true", help="go before other processes of the machine, where the system allows it"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-m MODULE or SCRIPT, and its arguments")
    options = parser.parse_args(arguments)
    if not options.command or options.command == ["-m"]:
        parser.error("there is nothing to run: name a script, or -m and a module")
    try:
        EmulatedDevice(options.rate[0], jitter=options.jitter, jitter_ms=options.jitter_ms)
    except ConfigError as error:
        parser.error(str(error))
    return options


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(rate > 0.0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are numbers of FLOP/s above 0, with commas between them")
    return rates


def _link(text: str) -> tuple[tuple[int, int] | None, Link]:
    """Parse an edge (None for all other links) and its link."""
    ranks, _, speed = text.rpartition("=")
    latency, _, rate = speed.partition(":")
    try:
        one, other = (int(rank) for rank in ranks.split("-")) if ranks else (0, 1)
        if one < 0 or other < 0 or one == other:
            raise ValueError
        return (one, other) if ranks else None, Link(float(latency), float(rate or "inf"))
    except (ValueError, ConfigError):
        raise argparse.ArgumentTypeError(
            f"{text!r}: allowed is a latency in ms from 0, such as 0.5, with a rate above 0, such as 0.5:1e9, and with "
            "two ranks, such as 1-2=0.5:1e9"
        ) from None


if __name__ == "__main__":
    main()
