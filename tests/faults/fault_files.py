"""Disks that are full, gone or slow, checkpoints that were damaged, and planners that die or hang, on every host."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import hosts
import pytest
from disturbed_runs import HOSTS, each_host, report_of
from jobs import Tell, start

from tf_adapters.training import plan_maker

STEPS = 40
SECTION = {
    "max_freeze_ratio": 0.8,
    **{"warmup_steps": 4, "monitoring_steps": 10, "progressive_steps": 4, "monitoring_precision": 1e-6},
    **{"replan_interval": 2, "replan_threshold": 0.0, "on_error": "warn"},
}


def full_disk() -> None:
    """For every file but the rank's output, which another process writes from here on."""
    copy = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert copy.stdin is not None
    os.dup2(copy.stdin.fileno(), 1)
    os.dup2(copy.stdin.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # bytes of any one file


def gone_folder() -> None:
    shutil.rmtree("out", ignore_errors=True)
    Path("out").write_text("a file in its place")


def slow_disk() -> None:
    written = os.fsync

    def fsync(file: int) -> None:
        time.sleep(2.0)
        written(file)

    os.fsync = fsync  # type: ignore[assignment]


DISKS: dict[str, Callable[[], None]] = {"full": full_disk, "gone": gone_folder, "slow": slow_disk}


def train_on(tell: Tell, host: str, disk: str) -> None:
    """Train; from the sixth step on rank 0's disk is as said. Rank 1 tells how long its steps took."""
    section = SECTION if disk != "slow" else {**SECTION, "replan_interval": 1000, "replan_threshold": 0.0}
    training = hosts.start(host, section, output_dir="out")
    longest = 0.0
    for number in range(STEPS):
        if number == 6 and int(os.environ["RANK"]) == 0:
            DISKS[disk]()
        began = time.monotonic()
        training.step(number)
        longest = max(longest, time.monotonic() - began)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    state = training.controller.state
    tell(failure=state.failure, phase=training.controller.phase.value, longest=longest)
    training.detach()


@each_host
@pytest.mark.parametrize("disk", DISKS)
def fault_the_disk_of_rank_0(host: str, disk: str, tmp_path: Path) -> None:
    """Training goes on to stable freezing, with a warning; what is left is a whole report or none."""
    with start(train_on, host, tmp_path, disk) as job:
        assert job.ended() == [0, 0], job.output(0)
        for rank in range(2):
            last = job.events(rank)[-1]
            assert (last["failure"], last["phase"]) == (None, "stable")
        said = [line for line in job.output(0).splitlines() if "report" in line]
        assert "Traceback" not in job.output(0)
        if disk != "slow":
            assert len(said) == 1, job.output(0)
        if disk != "gone":
            report_of(tmp_path)


# --- what a checkpoint holds of us -----------------------------------------------------------------------------


def cut_off(state: dict[str, Any]) -> Any:
    return {name: state[name] for name in list(state)[: len(state) // 2]}


def edited(state: dict[str, Any]) -> Any:
    (batch,) = state["plans"]
    plan = {**batch["plan"], "freeze_ratio": dict.fromkeys(batch["plan"]["freeze_ratio"], 7.0)}
    return {**state, "plans": [{**batch, "plan": plan}]}


def newer(state: dict[str, Any]) -> Any:
    return {**state, "format": 99}


def older(state: dict[str, Any]) -> Any:
    path = Path(__file__).resolve().parents[1] / "data" / "state_format_1.json"
    return json.loads(path.read_text())


def text(state: dict[str, Any]) -> Any:
    return json.dumps(state)[:100]


def with_nan(state: dict[str, Any]) -> Any:
    return {**state, "measurement": {**state["measurement"], "unfrozen_step_ms": float("nan")}}


DAMAGE = {"cut off": cut_off, "edited": edited, "newer": newer, "older": older, "text": text, "NaN": with_nan}


def resume_from(tell: Tell, host: str, damage: str) -> None:
    """Train to stable freezing; go on in a fresh run from a state that was damaged, on rank 0's side or on both."""
    first = hosts.start(host, SECTION, output_dir="out")
    for number in range(24):
        first.step(number)
    state = first.controller.state_dict()
    first.detach()
    for only_rank_0 in (False, True):
        training = hosts.start(host, SECTION, output_dir="out")
        rank = int(os.environ["RANK"])
        training.controller.load_state_dict(state if only_rank_0 and rank else DAMAGE[damage](state))
        begun = training.controller.phase.value
        for number in range(STEPS):
            training.step(number)
        tell(failure=training.controller.state.failure, begun=begun, phase=training.controller.phase.value)
        training.detach()


@each_host
@pytest.mark.parametrize("damage", DAMAGE)
def fault_a_state_was_damaged(host: str, damage: str, tmp_path: Path) -> None:
    """One line says so, and the run is monitored and planned for anew, on all ranks alike."""
    with start(resume_from, host, tmp_path, damage) as job:
        assert job.ended() == [0, 0], job.output(0) + job.output(1)
        for rank in range(2):
            for event in job.events(rank):
                assert event["failure"] is None
                assert event["begun"] in ("warmup", "monitoring_upper")
                assert event["phase"] == "stable"
        assert job.output(0).count("the checkpoint's state ") == 2, job.output(0)


# --- the planner's process ---------------------------------------------------------------------------------------


@mock.patch.object(plan_maker, "_SOLVED_AT_ONCE", 0)
def train_while_planning(tell: Tell, host: str, number_of_signal: int) -> None:
    section = {**SECTION, "solver_time_limit_s": 3.0}
    training = hosts.start(host, section, output_dir="out")
    sent, number = False, 0
    deadline = time.monotonic() + 60.0
    told = True
    while told:
        training.step(number)
        number += 1
        worker = training.controller._decisions.plan_maker._worker
        if worker is not None and not sent:
            worker._process.send_signal(number_of_signal)
            sent = True
        told = training.controller.state.failure is None and time.monotonic() < deadline
    tell(failure=training.controller.state.failure, step=training.controller.step)
    for more in range(5):
        training.step(number + more)
    training.detach()


@each_host
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGSEGV"])
def fault_the_planner(host: str, name: str, tmp_path: Path) -> None:
    """Killed, hung or crashed: on all ranks training goes on without freezing, from the same step, and says why."""
    with start(train_while_planning, host, tmp_path, int(signal.Signals[name])) as job:
        assert job.ended() == [0, 0], job.output(0)
        ends = [job.events(rank)[-1] for rank in range(2)]
        assert ends[0] == ends[1]
        assert ends[0]["failure"]
        assert job.orphans() == []


assert HOSTS
