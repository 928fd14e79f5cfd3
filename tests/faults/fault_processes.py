"""Processes that are killed, stopped, started again, forked or in each other's way, on every host."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hosts
import pytest
from disturbed_runs import LIFE, each_host, report_of, train, train_beside
from jobs import GRACE_S, Tell, start

PHASES = ("warmup", "monitoring_upper", "planning", "progressive", "stable")


@each_host
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("killed", [0, 1])
def fault_a_rank_is_killed(host: str, phase: str, killed: int, tmp_path: Path) -> None:
    """The other ends with the host's own error, soon, without a second one of ours; the last report is whole."""
    with start(train_beside, host, tmp_path, LIFE, 100_000) as job:
        job.wait_for(lambda event: event.get("phase") == phase, rank=killed)
        time.sleep(random.Random(f"{host}{phase}{killed}").uniform(0.0, 0.05))
        job.signal(killed, signal.SIGKILL)
        codes = job.ended(GRACE_S)
        assert codes[killed] == -signal.SIGKILL
        assert codes[1 - killed] == 1, job.output(1 - killed)
        assert job.orphans() == []
        said = job.output(1 - killed)
        assert said.count("Traceback (most recent call last)") <= 1 + said.count("above exception"), said
        report_of(tmp_path)


@each_host
@pytest.mark.parametrize("phase", ["monitoring_upper", "stable"])
def fault_a_rank_is_stopped_for_20_s(host: str, phase: str, tmp_path: Path) -> None:
    """Training goes on, and the plan is not that of a pipeline whose stage takes 20 s."""
    section = {**LIFE, "warmup_steps": 4, "monitoring_steps": 40, "progressive_steps": 2, "monitoring_precision": 1e-6}
    with start(train, host, tmp_path, section, 120) as job:
        job.wait_for(lambda event: event.get("phase") == phase, rank=1)
        job.signal(1, signal.SIGSTOP)
        time.sleep(20.0)
        job.signal(1, signal.SIGCONT)
        assert job.ended() == [0, 0]
        last = job.events(0)[-1]
        assert last["failure"] is None
        assert last["phase"] == "stable"
        assert last["unfrozen_ms"] < 1000.0
        report = report_of(tmp_path)
        assert report is not None
        assert report["measured"]["planned_step_ms"] < 1000.0


@each_host
def fault_ranks_fork_and_the_copies_end(host: str, tmp_path: Path) -> None:
    """As data loaders and other tools do; a copy that ends takes no report and no group along."""
    with start(fork_now_and_then, host, tmp_path) as job:
        assert job.ended() == [0, 0]
        assert job.events(0)[-1] == {"copies": [0, 0, 0], "failure": None, "status": None}
        report = report_of(tmp_path)
        assert report is not None
        assert report["status"] == "stable"


def fork_now_and_then(tell: Tell, host: str) -> None:
    section = {
        "warmup_steps": 2,
        "monitoring_steps": 4,
        "progressive_steps": 2,
        "replan_interval": 1000,
        "replan_threshold": 0.0,
    }
    training = hosts.start(host, section, output_dir="out")
    copies, status = [], None
    for number in range(12):
        training.step(number)
        if number in (1, 5, 10):
            copy = os.fork()
            if copy == 0:
                import atexit

                atexit._run_exitfuncs()
                os._exit(0)
            copies.append(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
    if (written := report_of(Path("out"))) is not None and number != 11:
        status = written["status"]
    failure = training.controller.state.failure
    training.detach()
    tell(copies=copies, failure=failure, status=status)


@each_host
def fault_two_runs_share_a_folder(host: str, tmp_path: Path) -> None:
    """Both train to their ends, and what lies there is one of their reports, whole."""
    section = {
        **LIFE,
        "warmup_steps": 2,
        "monitoring_steps": 10,
        "progressive_steps": 2,
        "replan_interval": 1,
        "replan_threshold": 0.0,
    }
    section["output_dir"] = str(tmp_path / "shared")
    with start(train, host, tmp_path / "a", section, 60) as one, start(train, host, tmp_path / "b", section, 60) as two:
        assert one.ended() == two.ended() == [0, 0]
        assert one.events(0)[-1]["failure"] is two.events(0)[-1]["failure"] is None
        report = report_of(tmp_path / "shared")
        assert report is not None
        assert report["status"] == "stable"


# --- resuming in new processes ---------------------------------------------------------------------------------


def train_and_save(tell: Tell, host: str, section: dict[str, Any], until: int, further: int) -> None:
    """Train, save, and tell what the next steps would have been."""
    training = hosts.start(host, section, output_dir="out")
    for number in range(until):
        training.step(number)
    training.save("saved")
    tell(phase=training.controller.phase.value, losses=[training.step(until + number) for number in range(further)])
    training.detach()


def load_and_train(tell: Tell, host: str, section: dict[str, Any], saved: str, until: int, further: int) -> None:
    training = hosts.start(host, section, output_dir="out")
    training.load(saved)
    phase = training.controller.phase.value
    losses = [training.step(until + number) for number in range(further)]
    while training.controller.phase.value != "stable":
        training.step(until)
    tell(phase=phase, losses=losses, failure=training.controller.state.failure)
    training.detach()


@each_host
@pytest.mark.parametrize(("until", "phase"), [(1, "warmup"), (6, "monitoring"), (13, "progressive"), (20, "stable")])
def fault_a_job_goes_on_in_new_processes(host: str, until: int, phase: str, tmp_path: Path) -> None:
    """With the same losses, unless monitoring was cut off, which starts over."""
    section = {"warmup_steps": 4, "monitoring_steps": 8, "progressive_steps": 6, "monitoring_precision": 1e-6}
    with start(train_and_save, host, tmp_path / "a", section, until, 3) as first:
        assert first.ended() == [0, 0], first.output(0)
    with start(load_and_train, host, tmp_path / "b", section, str(tmp_path / "a" / "saved"), until, 3) as second:
        assert second.ended() == [0, 0], second.output(0)
    for rank in range(2):
        before, after = first.events(rank)[-1], second.events(rank)[-1]
        assert after["failure"] is None
        assert before["phase"].startswith(phase)
        if phase == "monitoring":
            assert after["phase"] == "monitoring_upper"
        else:
            assert after["phase"] == before["phase"]
            assert after["losses"] == before["losses"]


ELASTIC = """
import os, sys, json
sys.path[:0] = {paths!r}
import torch, hosts
hosts.setup({host!r})
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo")
section = dict(warmup_steps=4, monitoring_steps=8, progressive_steps=6)
training = hosts.start({host!r}, section, output_dir="out")
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if again:
    training.load("saved")
for number in range(training.controller.step - 1, 30):
    training.step(number)
    if number == 20 and not again:
        training.save("saved")
    if number == 22 and not again and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), 9)
state = training.controller.state
with open(f"rank{{torch.distributed.get_rank()}}.txt", "w") as file:
    json.dump([again, state.completed_steps, state.failure, training.controller.phase.value], file)
training.detach()
"""


@each_host
def fault_torchrun_starts_the_ranks_again(host: str, tmp_path: Path) -> None:
    """``--max-restarts``: the job goes on from its checkpoint, frozen as before."""
    import launching

    tests = Path(__file__).resolve().parents[1]
    script = tmp_path / "job.py"
    script.write_text(ELASTIC.format(paths=[str(tests / "helpers"), str(tests.parent)], host=host))
    options = ["--standalone", "--max-restarts", "1", "--monitor-interval", "0.2"]
    # Without it, torch's ranks may find the addresses of the dead ones and wait for them, with or without us.
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    status, output = launching.torchrun(str(script), options=options, cwd=tmp_path, **store)
    assert status == 0, output
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.txt").read_text()) == [1, 30, None, "stable"]


assert sys.platform == "linux"  # /proc, signals
