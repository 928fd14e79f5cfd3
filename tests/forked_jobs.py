"""Jobs of a host on two ranks, forked from one process of their own that has imported it: ``python forked_jobs.py``.

A module of jobs has ``prepare()``, which imports the host, and ``run(rank, folder)``, which runs all of its jobs and
returns what this rank tells of them, as plain data.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class StandIn(types.ModuleType):
    """A module that is not there, of classes that do nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


def outcomes_of(module: str, folder: Path, timeout_s: float, **settings: str) -> list[dict[str, Any]]:
    """What each rank tells of the jobs of a module, by name."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__)), module, str(folder)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": paths,
            **settings,
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    outcomes = folder / "outcomes.json"
    assert outcomes.exists(), (process.stdout + process.stderr)[-6000:]
    told: list[dict[str, Any]] = json.loads(outcomes.read_text())
    return told


def main(module: str, folder: str) -> None:
    jobs = importlib.import_module(module)
    jobs.prepare()
    from tf_adapters.testing.ranks import free_port

    with multiprocessing.get_context("fork").Pool(2) as pool:
        port = free_port()
        told = pool.starmap(_on_rank, [(module, rank, folder, port) for rank in range(2)], chunksize=1)
    Path(folder, "outcomes.json").write_text(json.dumps(told))


def _on_rank(module: str, rank: int, folder: str, port: int) -> Any:
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    return sys.modules[module].run(rank, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
