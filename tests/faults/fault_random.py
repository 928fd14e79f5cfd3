"""Runs with random settings and random events, each step's gradients held against an ordinary copy's.

``FAULT_RUNS`` says how many there are in all (600), ``FAULT_SEED`` where they begin. A run is made again by its number.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hosts
import pytest
import torch
from rank_pools import rank_pool

from tf_adapters.testing import force_plan, relative_error
from tf_adapters.testing.emulated_device import EmulatedDevice

RUNS, SEED = int(os.environ.get("FAULT_RUNS", "600")), int(os.environ.get("FAULT_SEED", "0"))
IN_ONE_CALL = 10
STEPS = 12
TOLERANCE = 1e-5
RATE = 2e9  # FLOP/s: an operation of these layers sleeps for some microseconds


class Run:
    """One run on this rank. Every rank draws the same from ``draw``."""

    def __init__(self, host: str, number: int, folder: str) -> None:
        self.host, self.number, self.folder = host, number, folder
        self.output = Path(folder) / "timely_freeze"
        self.draw = random.Random(f"{host} {number}")
        self.rank = int(os.environ["RANK"])
        self.section = self.settings()
        self.training = hosts.start(host, self.section, folder)
        self.worst = 0.0
        self.log: list[str] = [json.dumps(self.section)]
        self.failures: set[str] = set()

    def settings(self) -> dict[str, Any]:
        draw = self.draw
        section: dict[str, Any] = {
            "warmup_steps": draw.choice((0, 1, 2)),
            "monitoring_steps": draw.choice((2, 4, 6)),
            "progressive_steps": draw.choice((0, 1, 3)),
            "max_freeze_ratio": draw.choice((0.0, 0.3, 0.8, 1.0)),
            "weight_gradients": draw.choice(("in_place", "deferred")),
            "granularity": draw.choice(("tensor", "tensor", "token")),
            "gradient_scale": draw.choice(("skipped_as_zero", "computed_mean")),
            "replan_interval": draw.choice((2, 5, 50)),
            "replan_threshold": draw.choice((0.0, 0.05)),
            "monitoring": draw.choice(("mixed", "halves")),
            "seed": draw.randrange(1000),
            "on_error": "warn",
        }
        if section["granularity"] == "tensor" and draw.random() < 0.3:
            section["method"] = draw.choice(("timely+apf", "timely+autofreeze", "none"))
            section["stability_check_interval"] = draw.choice((1, 2, 4))
        return section

    def live(self) -> None:
        for number in range(STEPS):
            if self.draw.random() < 0.35:
                event = self.draw.choice(EVENTS)
                self.log.append(f"before step {number}: {event.__name__}")
                event(self)
            self.step(number)
        self.training.detach()

    def step(self, number: int) -> None:
        controller = self.training.controller
        masks = {
            (s, m): controller.frozen_parameters(controller.step, s, m)
            for s in range(hosts.STAGES)
            for m in range(hosts.MICROBATCHES)
        }
        samples = controller.config.samples_tokens and controller.phase.value != "warmup"
        checked = not samples and self.draw.random() < 0.6
        full = self.training.full_gradients(number) if checked else []
        self.training.step(number)
        if controller.state.failure:
            self.failures.add(controller.state.failure)
        if not checked:
            return
        for (stage, name), actual in self.training.gradients().items():
            kept = [g[stage, name] * (name not in masks[stage, m]) for m, g in enumerate(full)]
            expected = torch.stack(kept).mean(0)
            if controller.config.gradient_scale == "computed_mean":
                expected *= len(full) / max(1, sum(name not in masks[stage, m] for m in range(len(full))))
            error = relative_error(actual, expected) if expected.norm() else float(actual.norm())
            if error > self.worst:
                self.worst = error
                if error > TOLERANCE:
                    self.log.append(f"step {number}, stage {stage}, {name}: off by {error:.1e}")

    # --- what happens between the steps ------------------------------------------------------------------------

    def another_plan(self) -> None:
        if self.training.controller.config.plans and not self.training.controller.state.failure:
            force_plan(self.training.controller, self.draw.choice((0.0, 0.2, 0.5, 0.9)))

    def save_and_go_on(self) -> None:
        folder = f"{self.folder}/saved{self.draw.randrange(10**9)}"
        self.training.save(folder)
        self.training.detach()
        self.begin_again(folder)

    def begin_again(self, saved: str) -> None:
        del self.training
        gc.collect()  # the Megatron tests' next start exempts what is left from collection
        if self.rank == 0 and self.output.is_file():
            self.output.unlink()  # attaching refuses a folder that is none
        self.training = hosts.start(self.host, self.section, self.folder)
        self.training.load(saved)

    def load_what_was_damaged(self) -> None:
        state = self.training.controller.state_dict()
        damaged = self.draw.choice(
            (
                {**state, "completed_steps": state["completed_steps"] + 1},
                {name: state[name] for name in list(state)[:5]},
                {**state, "format": 99},
                json.dumps(state)[:200],
                None,
            )
        )
        self.training.controller.load_state_dict(damaged)

    def lose_the_planner(self) -> None:
        number = self.draw.choice((signal.SIGKILL, signal.SIGTERM))
        worker = self.training.controller._decisions.plan_maker._worker
        if worker is not None:
            worker._process.send_signal(number)

    def stand_still(self) -> None:
        if self.rank == self.draw.randrange(hosts.STAGES):
            time.sleep(0.2)

    def lose_the_folder(self) -> None:
        if self.rank == 0 and self.output.is_dir():
            shutil.rmtree(self.output)
            self.output.write_text("a file in its place")

    def evaluate_gradients_of_a_copy(self) -> None:
        self.training.full_gradients(self.draw.randrange(5))

    def train_alone_and_attach_again(self) -> None:
        folder = f"{self.folder}/saved{self.draw.randrange(10**9)}"
        self.training.save(folder)
        self.training.detach()
        self.training.step(77)
        self.begin_again(folder)


EVENTS: tuple[Callable[[Run], None], ...] = (
    *(Run.another_plan, Run.another_plan, Run.another_plan, Run.save_and_go_on, Run.load_what_was_damaged),
    *(Run.lose_the_planner, Run.stand_still, Run.lose_the_folder, Run.evaluate_gradients_of_a_copy),
    Run.train_alone_and_attach_again,
)


def live(host: str, number: int, folder: str) -> dict[str, Any]:
    """One run; what went wrong. Called on all ranks at once."""
    with EmulatedDevice(RATE, jitter=0.2, seed=number):
        run = Run(host, number, folder)
        run.live()
    return {
        "number": number,
        "worst": run.worst,
        "failures": sorted(run.failures),
        "log": run.log,
    }


def run_many(host: str, numbers: range, folder: str) -> list[dict[str, Any]]:
    return [live(host, number, f"{folder}/{number}") for number in numbers]


def held(host: str) -> dict[str, int]:
    """What this rank still has once the runs before and their groups are gone."""
    return {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd"))}


def check(host: str, numbers: range, folder: str) -> list[dict[str, int]]:
    """Run them, ``IN_ONE_CALL`` after another on the host's ranks; what rank 0 then holds, call by call."""
    pool, holding = rank_pool(host, hosts.STAGES), []
    for first in range(numbers.start, numbers.stop, IN_ONE_CALL):
        some = range(first, min(first + IN_ONE_CALL, numbers.stop))
        of_ranks = pool.run(run_many, host, some, folder)
        for of_runs in of_ranks:
            for outcome in of_runs:
                assert outcome["worst"] <= TOLERANCE, "\n".join(outcome["log"])
        for one, other in zip(*of_ranks, strict=True):
            assert one["failures"] == other["failures"], "\n".join(one["log"])
        holding.append(pool.run(held, host)[0])
    return holding


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("host", [name for name in hosts.HOSTS if " " not in name])
def fault_nothing_of_all_this_hangs_or_is_wrong_or_leaks(host: str, tmp_path: Path) -> None:
    runs = RUNS // 3
    holding = check(host, range(SEED, SEED + runs), str(tmp_path))
    print(f"{host}: {runs} runs; after the first ones {holding[0]}, after the last {holding[-1]}")
    for name, first in holding[0].items():
        assert holding[-1][name] <= first + 2


if __name__ == "__main__":  # python tests/faults/fault_random.py HOST NUMBER
    with tempfile.TemporaryDirectory() as folder:
        one = partial(check, sys.argv[1], range(int(sys.argv[2]), int(sys.argv[2]) + 1), folder)
        print(json.dumps(one(), indent=1))
