"""Jobs of a trainer on two ranks, forked from one process of their own that has imported it: ``python forked_jobs.py``.

A module of jobs has ``JOBS``, by name; ``prepare()``, which imports the trainer; and ``run(job, folder, told)``, which
runs one of them on this rank, in the folder of all, and adds to what is told of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
FREEZING: dict[str, Any] = {
    **{"max_freeze_ratio": 0.8, "warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 2},
    **{"replan_interval": 1, "replan_threshold": 0.0, "on_error": "raise"},
}


@dataclass
class Told:
    """What one rank tells of one job."""

    losses: dict[int, float] = field(default_factory=dict)  # by step, on the rank of the last stage
    figures: dict[int, dict[str, float]] = field(default_factory=dict)  # of ours that the trainer logs, by step
    parameters: str = ""  # a digest of this rank's, at the end
    said: str = ""
    error: str = ""  # with its kind before it
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """Ours, of what was said."""
        return [line for line in self.said.splitlines() if "timely_freeze" in line or "error:" in line]


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


def digest(parameters: Iterable[Any]) -> str:
    """Of their bits: a replica's share of those that are sharded."""
    import torch

    found = hashlib.sha256()
    for parameter in parameters:
        values = getattr(parameter, "_local_tensor", parameter.detach())
        found.update(values.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def outcomes_of(module: str, folder: Path) -> dict[str, list[Told]]:
    """What each rank tells of the jobs of a module, by name."""
    from tf_adapters.testing.ranks import HANG_S  # not where ranks run this file, before their stand-ins are there

    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), module, str(folder)],
        cwd=folder,
        env={**os.environ, **SETTINGS, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=HANG_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # its ranks too
        process.wait()
    assert process.returncode == 0, said[-6000:]
    of_ranks = [pickle.loads((folder / f"told-{rank}.pickle").read_bytes()) for rank in range(2)]
    return {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


def main(module: str, folder: str) -> None:
    jobs = importlib.import_module(module)
    jobs.prepare()
    from tf_adapters.testing.ranks import free_port

    ports = [free_port() for _ in jobs.JOBS]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_run_rank, args=(jobs, rank, Path(folder), ports)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def _run_rank(jobs: Any, rank: int, folder: Path, ports: list[int]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    told = {}
    for (name, job), port in zip(jobs.JOBS.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        told[name] = _told_of(jobs, job, folder)
        (folder / f"told-{rank}.pickle").write_bytes(pickle.dumps(told))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _told_of(jobs: Any, job: Any, folder: Path) -> Told:
    """Of a job whatever happens; our own lines too, where the trainer sends those of all loggers elsewhere."""
    told, lines = Told(), logging.StreamHandler(io.StringIO())
    logging.getLogger("tf_adapters").addHandler(lines)
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            jobs.run(job, folder, told)
        except (Exception, SystemExit) as error:
            told.error = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    logging.getLogger("tf_adapters").removeHandler(lines)
    told.said = said.getvalue() + lines.stream.getvalue()
    return told


if __name__ == "__main__":
    from forked_jobs import main as main_of_module  # what it writes is read by the module's name

    main_of_module(*sys.argv[1:])
