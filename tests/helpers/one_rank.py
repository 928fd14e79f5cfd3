"""A controller of one rank with one stage of four equal tensors, and its training, on a clock that only this moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from clocks import FakeClock

from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.report.observer import RunReporter
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.testing.plans import tensor_units
from tf_adapters.training.controller import Controller
from tf_adapters.training.pipeline import HostInfo, HostPipeline

HOST = HostInfo("test", "0")
CLOCK = FakeClock()  # no other load of the machine is in the times
LIFE = {"goal": "paper", "warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 2}


def controller_of(schedule: PipelineSchedule, folder: Path, clock: Any = CLOCK, **settings: Any) -> Controller:
    parameters = {0: {f"{name}.w": torch.nn.Parameter(torch.ones(8, 8)) for name in "abcd"}}
    config = TimelyFreezeConfig(**{**LIFE, "output_dir": str(folder), **settings})
    pipeline = HostPipeline(HOST, schedule, {0: tensor_units(parameters[0])}, parameters, clock=clock)
    collectives = Collectives()
    return Controller(config, pipeline, collectives, RunReporter(collectives))


def train(controller: Controller, steps: int) -> list[float]:
    """Train; returns each step's mean frozen share. Freezing a whole backward spares half of it."""
    shares = []
    microbatches = controller.schedule.num_microbatches
    for _ in range(steps):
        controller.begin_step()
        for action in controller.schedule.ranks[0]:
            with controller.running(action):
                share = controller.mask(0, action.microbatch).share if action.freezable else 0.0
                CLOCK.now += 2.0 * (1 - 0.5 * share)
        shares.append(sum(controller.mask(0, m).share for m in range(microbatches)) / microbatches)
        controller.end_step()
    return shares
