"""Scripts of the examples under torchrun and DeepSpeed's launcher, in processes that end whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tf_adapters.testing.ranks import free_port

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


def deepspeed(script: str | Path, settings: Path, *arguments: object, timeout_s: float = 140) -> tuple[int, str]:
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
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            buffer.unlink()  # DeepSpeed's CPU backend leaves 69 MB of shared memory for each rank
    return process.returncode, output


def _end(process: subprocess.Popen[str]) -> None:
    """End a launcher that still runs. It ends its ranks, by force after 30 s: they are not in its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()
