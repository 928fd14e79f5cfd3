"""Scripts of the examples on two ranks, in processes that end whatever happens.

Under torchrun and DeepSpeed's launcher every process imports its host anew, which takes most of a test's time: one test
of each launcher shows that it works, and all others fork their ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rank_pools import PRELOAD

from tf_adapters.testing.ranks import HANG_S, free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def forked(script: str | Path, *arguments: object, timeout_s: float = HANG_S) -> tuple[int, str]:
    """Run a script on two forked ranks, as torchrun would; its exit code, and all that it said."""
    return _on_forked_ranks(_run_script, [str(script), *map(str, arguments)], timeout_s)


def forked_deepspeed(
    script: str | Path, settings: Path, *arguments: object, timeout_s: float = HANG_S
) -> tuple[int, str]:
    """The same with freezing, as DeepSpeed's launcher would start ``tf_adapters.deepspeed``."""
    command = ["tf_adapters.deepspeed", str(script), "--deepspeed_config", str(settings), *map(str, arguments)]
    return _on_forked_ranks(_run_deepspeed, command, timeout_s)


def _on_forked_ranks(run: Any, command: list[str], timeout_s: float) -> tuple[int, str]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    port = free_port()
    with tempfile.NamedTemporaryFile("r") as output:
        ranks = [context.Process(target=_rank, args=(rank, port, output.name, run, command)) for rank in range(2)]
        try:
            for process in ranks:
                process.start()
            deadline = time.monotonic() + timeout_s
            # One that failed leaves the other waiting.
            while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
                assert time.monotonic() < deadline, output.read()
                time.sleep(0.02)
            for process in ranks:
                process.join(3)
            codes = [process.exitcode for process in ranks if process.exitcode]
        finally:
            for process in ranks:
                process.kill()
                process.join()
            _unlink_shared_memory(port)
        return (codes or [0])[0], output.read()


def _rank(rank: int, port: int, output: str, run: Any, command: list[str]) -> None:
    where = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(where, 1)
    os.dup2(where, 2)
    os.chdir(ROOT)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = command
    run()


def _run_script() -> None:
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _run_deepspeed() -> None:
    from tf_adapters.deepspeed.__main__ import main

    main()


def _unlink_shared_memory(port: int) -> None:
    """DeepSpeed's CPU backend leaves 69 MB of it for each rank."""
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        buffer.unlink()


def torchrun(
    script: str,
    *arguments: object,
    options: Sequence[str] = (),
    timeout_s: float = HANG_S,
    cwd: Path = ROOT,
    **settings: str,
) -> tuple[int, str]:
    """Run a script on two ranks, as its README does; its exit code, and all that it said."""
    meeting = options or ("--master-port", str(free_port()))
    process = subprocess.Popen(
        [BIN / "torchrun", "--nproc-per-node", "2", *meeting, script, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        _end(process)
    return process.returncode, output


def deepspeed(script: str | Path, settings: Path, *arguments: object, timeout_s: float = HANG_S) -> tuple[int, str]:
    """Run a script on two ranks under DeepSpeed's launcher, with freezing; its exit code, and all that it said."""
    port = free_port()
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.Popen(
        [
            *(BIN / "deepspeed", "--num_accelerators", "2", "--master_port", str(port)),
            *("--module", "tf_adapters.deepspeed", script, "--deepspeed_config", settings, *map(str, arguments)),
        ],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _unlink_shared_memory(port)
    return process.returncode, output


def _end(process: subprocess.Popen[str]) -> None:
    """End a launcher that still runs. It ends its ranks, by force after 30 s: they are not in its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=HANG_S)
        finally:
            process.kill()
