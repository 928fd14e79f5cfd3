"""Jobs of several real processes that a test watches and disturbs from outside.

A job's function runs on every rank and tells what it does, line by line; the test reads that, kills or stops ranks, and
sees how the others end. Nothing of a job outlives ``Job.close``, and what should have ended by itself is reported.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rank_pools import PRELOAD, prepare
from two_nodes import Node, node_folder

from tf_adapters.testing.ranks import HANG_S, free_port

Tell = Callable[..., None]
Function = Callable[..., None]
"""Called on each rank with ``tell``, which writes an event, and the job's arguments."""
MARK = "TF_ADAPTERS_FAULT_JOB"
"""In the environment of what ranks start: their planners."""
GRACE_S = 60.0
"""Within which the other ranks end once one is gone: gloo sees a closed connection at once."""


@dataclass
class Job:
    """Ranks that are running; events and output are files in ``folder``."""

    folder: Path
    mark: str
    ranks: list[Any] = field(default_factory=list)

    def events(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has told so far; an unfinished line is left out."""
        path = self.folder / f"rank{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def output(self, rank: int) -> str:
        path = self.folder / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, told: Callable[[dict[str, Any]], bool], rank: int = 0, timeout_s: float = HANG_S) -> None:
        """Until a rank has told something of which this holds."""
        deadline = time.monotonic() + timeout_s
        while not any(told(event) for event in self.events(rank)):
            assert time.monotonic() < deadline, f"not told within {timeout_s} s\n{self.output(rank)}"
            assert self.ranks[rank].is_alive(), f"rank {rank} ended\n{self.output(rank)}"
            time.sleep(0.01)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks[rank].pid, number)

    def ended(self, timeout_s: float = HANG_S) -> list[int]:
        """The exit codes, once all ranks have ended; a rank that does not is a hang."""
        deadline = time.monotonic() + timeout_s
        for rank, process in enumerate(self.ranks):
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} hangs\n{self.output(rank)[-3000:]}"
        return [process.exitcode for process in self.ranks]

    def orphans(self, within_s: float = 5.0) -> list[int]:
        """Processes that the ranks started and that are there although the ranks are not."""
        deadline = time.monotonic() + within_s
        while (left := self._started()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _started(self) -> list[int]:
        entry = f"{MARK}={self.mark}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if entry in _environment(pid)]

    def close(self) -> None:
        for process in self.ranks:
            if process.is_alive():
                process.kill()
            process.join()
        for pid in self._started():
            os.kill(pid, signal.SIGKILL)
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self.mark}_*"):
            buffer.unlink()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def start(
    function: Function,
    host: str,
    folder: Path,
    *arguments: Any,
    size: int = 2,
    nodes: Sequence[Node] = (),
    timeout_s: float = 1800.0,
) -> Job:
    """Start a job on ``size`` ranks that have imported the host; ``arguments`` go to ``function``.

    With ``nodes`` each has an equal share of the ranks, in order, and its own working directory in ``folder``.
    ``timeout_s`` is that of the process group, where the host does not make it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    job = Job(folder, str(port))
    for rank in range(size):
        environment = {MARK: str(port), "RANK": str(rank), "WORLD_SIZE": str(size), **_meeting(rank, size, port, nodes)}
        node = nodes[rank * len(nodes) // size] if nodes else None
        given = (function, host, str(folder), environment, node, timeout_s, arguments)
        process = context.Process(target=_rank, args=given)
        process.start()
        job.ranks.append(process)
    return job


def _meeting(rank: int, size: int, port: int, nodes: Sequence[Node]) -> dict[str, str]:
    """What torchrun says of this rank's node, and where ranks meet."""
    local = size // max(1, len(nodes))
    place = {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local), "GROUP_RANK": str(rank // local)}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**place, **(nodes[rank // local].environment() if nodes else here)}


def _rank(
    function: Function,
    host: str,
    folder: str,
    environment: Mapping[str, str],
    node: Node | None,
    timeout_s: float,
    arguments: Any,
) -> None:
    """One rank: as a script that torchrun started, which ends with Python's own end."""
    rank = environment["RANK"]
    output = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    try:
        if node is not None:
            node.enter()
        os.chdir(folder if node is None else node_folder(Path(folder), node.number))
        import torch

        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        prepare(host)
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        function(_teller(Path(folder) / f"rank{rank}.jsonl"), host, *arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()  # multiprocessing leaves them out
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _teller(path: Path) -> Tell:
    def tell(**event: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    return tell
