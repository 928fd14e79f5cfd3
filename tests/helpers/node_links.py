"""Four stages on two nodes whose clocks and starts differ, over emulated links, and how long messages took there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import Tell, start
from torch_ranks import SECTION, Case, build
from two_nodes import Node

from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.timer import Interval, Trace
from tf_adapters.measuring.transfers import complete_steps
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.testing.emulated_link import EmulatedLinks, Link

Edges = Mapping[tuple[Action, Action], float]
BETWEEN_RANKS, BETWEEN_NODES = Link(latency_ms=12.0), Link(latency_ms=25.0, bytes_per_s=1e5)
MESSAGE_BYTES = 2 * 5 * 12 * 4  # rows, tokens, width
LATE_S = 0.1
"""By how much the second node begins every step later."""


@dataclass(frozen=True)
class TimedRun:
    """A run until there is a plan: its transfers in ms as the plan has them, and the steps that they are from."""

    schedule: PipelineSchedule
    transfers: Edges
    steps: list[Trace]


def timed_run(nodes: tuple[Node, Node], folder: Path) -> TimedRun:
    """Two stages on a node. The second node's clock is a day ahead."""
    with start(train_over_links, "torch", folder, size=4, nodes=nodes) as job:
        assert job.ended() == [0] * 4, job.output(0) + job.output(3)
        told = [job.events(rank)[-1] for rank in range(4)]
    clocks = [event["clock_s"] for event in told]
    assert min(clocks[2:]) - max(clocks[:2]) > 86_000
    schedule = PipelineSchedule.from_text(told[0]["ranks"])
    steps = list(complete_steps(schedule, [traces_of(event) for event in told]).values())
    assert len(steps) >= 2
    return TimedRun(schedule, Measurement.from_json(told[0]["measurement"]).communication, steps)


def way_ms(stage: int, other: int) -> float:
    """How long the link model has a message between two stages under way."""
    link = BETWEEN_NODES if {stage, other} == {1, 2} else BETWEEN_RANKS
    return link.latency_ms + MESSAGE_BYTES / link.bytes_per_s * 1e3


def train_over_links(tell: Tell, host: str) -> None:
    """Train until there is a plan, over links that are emulated by the clock that all nodes share."""
    import torch.distributed as dist

    import tf_adapters.torch_pipelining

    section = {
        **SECTION,
        "warmup_steps": 2,
        "monitoring_steps": 8,
        "replan_interval": 1,
        "replan_threshold": 0.0,
        "output_dir": "out",
    }
    with EmulatedLinks(BETWEEN_RANKS, {(1, 2): BETWEEN_NODES}, clock=time.time):
        run = build(Case(ranks=4, microbatches=4, section=None))
        adapter = tf_adapters.torch_pipelining.attach(run.schedule, section, optimizer=run.optimizers)
        controller = adapter.controller
        for number in range(11):
            dist.barrier()
            time.sleep(LATE_S * (dist.get_rank() // 2))
            run.train_step(number)
        steps = controller.timer.traces(Phase.MONITORING_UPPER, controller.schedule.num_microbatches)
        measurement, ranks = controller.state.measurement.to_json(), controller.schedule.to_text()
        adapter.detach()
    traces = [
        (number, {str(action): (interval.start_ms, interval.end_ms) for action, interval in step.items()})
        for number, step in steps
    ]
    tell(clock_s=time.monotonic(), measurement=measurement, ranks=ranks, traces=traces)


def traces_of(event: dict[str, Any]) -> list[tuple[int, Trace]]:
    return [(n, {Action.parse(text): Interval(*pair) for text, pair in step.items()}) for n, step in event["traces"]]
