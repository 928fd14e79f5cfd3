"""Run functions in several real processes on this machine, joined by gloo."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

HANG_S = 600.0
"""Seconds after which a call, a job or a process counts as hanging. Tests take their limits from here.

It is no measure of speed. On two cores that six people shared, a call that compiles with Inductor took 60 s, and a host
that compiles an extension at its first import took as long. This is ten times that: only a hang exceeds it.
"""

_GRACE_S = 6.0  # for other ranks after one has failed: without their tracebacks the failure is the same
Hook = Callable[[], None] | None


class RanksFailed(AssertionError):
    """A rank raised, died or did not answer in time. The message has every rank's traceback."""


class RankPool:
    """``size`` processes with a gloo process group. They stay alive between calls, since start-up is slow.

    After a failure, also a timeout, the processes are killed, and the next call starts new ones. ``setup`` runs first
    in every process, ``teardown`` after every call. The modules of ``preload`` are imported once, in a server process
    from which every rank is forked. The list of the first pool is used for all later pools. Its modules must not
    start CUDA or a thread.
    """

    def __init__(self, size: int, setup: Hook = None, teardown: Hook = None, *, preload: Sequence[str] = ()) -> None:
        self.size = size
        self._preload = list(preload)
        self._hooks = (setup, teardown)
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = HANG_S) -> list[Any]:
        """Call ``function(*args)`` on every rank and return every rank's result. It must be importable by name.

        Raises RanksFailed if any rank raises, dies, or has not answered after ``timeout_s`` seconds.
        """
        try:
            if not self._processes:
                self._start()
            for connection in self._connections:
                connection.send((function, args))
            return self._collect(timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if self._preload else "spawn")
        if self._preload:
            context.set_forkserver_preload(self._preload)
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, port, self._hooks), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect(HANG_S)

    def _collect(self, timeout_s: float) -> list[Any]:
        """Return every rank's value. After a failure the other ranks probably wait for it, so they get little time."""
        deadline = time.monotonic() + timeout_s
        outcomes: list[tuple[Any, str | None]] = [(None, "no answer in time")] * self.size
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                outcomes[rank] = self._answer(rank)
                if outcomes[rank][1] is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        failures = [f"rank {rank}:\n{text}" for rank, (_, text) in enumerate(outcomes) if text]
        if failures:
            raise RanksFailed("\n".join(failures))
        return [value for value, _ in outcomes]

    def _answer(self, rank: int) -> tuple[Any, str | None]:
        try:
            answer = io.BytesIO(self._connections[rank].recv_bytes())
            return torch.load(answer, weights_only=False)  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            self._processes[rank].join(_GRACE_S)
            return None, f"died with exit code {self._processes[rank].exitcode}"


def free_port() -> int:
    """Return a free TCP port of this machine, below the range that the system gives to outgoing connections.

    A job listens on it seconds later. Until then an outgoing connection of another job could take a port of that range.
    """
    below = 29_000  # 29500 is torch's default
    with suppress(OSError):  # no such file: other systems than Linux begin higher
        below = min(int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), below)
    for _ in range(1000):
        port = random.SystemRandom().randrange(10_000, below) if below > 11_000 else 0
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("", port))
            return int(sock.getsockname()[1])
    raise OSError(f"no free TCP port from 10000 to {below}")


def _serve(connection: Connection, rank: int, size: int, port: int, hooks: tuple[Hook, Hook]) -> None:
    setup, teardown = hooks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _answer_call(connection, _join, (setup,))
    with suppress(EOFError):
        while True:
            function, args = connection.recv()
            _answer_call(connection, _call, (function, args, teardown))


def _end_with_parent() -> None:
    """End this rank with its parent: a rank that waits for others would survive a killed test run."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(function: Callable[..., Any], args: tuple[Any, ...], teardown: Hook) -> Any:
    value = function(*args)
    if teardown is not None:
        teardown()
    return value


def _join(setup: Hook) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # denormal numbers make toy models' times meaningless
    if setup is not None:
        setup()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")


def _answer_call(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = _packed((function(*args), None))
    except Exception:
        answer = _packed((None, traceback.format_exc()))
    connection.send_bytes(answer)


def _packed(answer: tuple[Any, str | None]) -> bytes:
    """Pickle with tensors by value: multiprocessing would share each tensor's memory, which takes milliseconds."""
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    return buffer.getvalue()
