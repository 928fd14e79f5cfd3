"""Scripts of the examples under torchrun, in processes that end whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def torchrun(script: str, *arguments: object, timeout_s: float = 120) -> tuple[int, str]:
    """Run a script on two ranks, as its README does; its exit code, and all that it said."""
    process = subprocess.Popen(
        [
            *(BIN / "torchrun", "--nproc-per-node", "2", "--master-port", str(free_port())),
            *(script, *map(str, arguments)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        _end(process)
    return process.returncode, output


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _end(process: subprocess.Popen[str]) -> None:
    """End a launcher that still runs. It ends its ranks, by force after 30 s: they are not in its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()
