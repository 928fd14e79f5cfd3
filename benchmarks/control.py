"""What control costs with many ranks: bytes and time of everything that ranks send each other because of freezing.

Real ranks over gloo on this machine run our own collectives on synthetic steps of a realistic size: 1F1B, 64
microbatches, 32 traced steps. Bytes for 1,024 and 8,192 ranks (64 stages) follow from the measured messages, whose
number and sizes are known. Of times, each rank's processor time is extrapolated, along a plane in the numbers of ranks
and of stages: the ranks share this machine's cores, so their wall-clock times (in the JSON) say little of a cluster.

Prints a table, writes results/control.json beside this file and the table into docs/algorithm.md.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measuring import machine, put_table

from tf_adapters.collectives import ProcessGroupCollectives, on_one_rank
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.hosts.agreement import agree_on_settings, gather_units
from tf_adapters.planner.solve import solve
from tf_adapters.report.observer import RunReporter
from tf_adapters.schedule.ir import Kind
from tf_adapters.schedule.orders import one_forward_one_backward
from tf_adapters.testing import RankPool, force_plan
from tf_adapters.testing.plans import tensor_units
from tf_adapters.training.controller import Controller
from tf_adapters.training.decisions import verify_schedule
from tf_adapters.training.pipeline import HostInfo, HostPipeline
from tf_adapters.training.plan_maker import PlanMaker
from tf_adapters.training.replanning import PlanWatch

CASES = ((2, 2), (4, 2), (8, 4), (16, 2), (16, 8))  # ranks, stages; the last one is extrapolated from
LARGE = (1_024, 8_192)
STAGES_OF_LARGE = 64
MICROBATCHES = 64
TENSORS = 48
TRACED = 32
REPEATS = 5
FIRST_BROADCAST = 520  # bytes that every decision takes, however small it is
MS = {Kind.FORWARD: 10.0, Kind.BACKWARD: 20.0}
HOST = HostInfo("synthetic", "0")
ROOT = Path(__file__).resolve().parents[1]


class SyntheticClock:
    """A clock that the benchmark moves."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def elapsed_ms(self, start: float, stop: float) -> float:
        return stop - start

    def synchronize(self) -> None: ...


class CountedCollectives(ProcessGroupCollectives):
    """Collectives that count this rank's bytes: ``gathered`` is what each rank adds to what all ranks get."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.gathered = self.sent = self.broadcasts = 0

    def _gather_bytes(self, content: bytes, width: int) -> list[bytes]:
        self.gathered += width
        return super()._gather_bytes(content, width)

    def _broadcast_bytes(self, content: bytes, length: int, source: int) -> bytes:
        self.broadcasts += length
        return super()._broadcast_bytes(content, length, source)

    def _send_to_first(self, content: bytes, length: int, source: int) -> bytes:
        if source and self.rank == source:
            self.sent += length
        return super()._send_to_first(content, length, source)


@dataclass(frozen=True)
class OfRank:
    """One event on one rank: bytes as ``CountedCollectives`` counts them, median ms of wall clock and of processor."""

    gathered: int
    sent: int
    broadcasts: int
    wall_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Row:
    """One event at one number of ranks.

    Attributes:
        of_first_replica: most bytes that a rank of the first replica sends.
        of_others: most bytes that another rank sends.
        received_by_first: bytes that rank 0 receives.
        received: bytes that each other rank receives.
        cpu_ms: median processor time of the rank that takes most.
        wall_ms: the slowest rank's median on this machine; None where extrapolated.
        extrapolated: whether it follows from smaller numbers of ranks.
    """

    event: str
    ranks: int
    stages: int
    of_first_replica: int
    of_others: int
    received_by_first: int
    received: int
    cpu_ms: float
    wall_ms: float | None = None


def main() -> None:
    rows: list[Row] = []
    for size, stages in CASES:
        with RankPool(size) as pool, tempfile.TemporaryDirectory() as folder:
            ranks = pool.run(measure, folder, stages, timeout_s=900)
        rows += [row_of(event, stages, [rank[event] for rank in ranks]) for event in ranks[0]]
        print(f"{size} ranks, {stages} stages measured", flush=True)
    events = list(dict.fromkeys(row.event for row in rows))
    rows += [extrapolated([row for row in rows if row.event == event], size) for event in events for size in LARGE]
    table = table_of(events, rows)
    print(table)
    record = {"machine": machine(), "microbatches": MICROBATCHES, "rows": [asdict(row) for row in rows]}
    (ROOT / "benchmarks" / "results" / "control.json").write_text(json.dumps(record, indent=1) + "\n")
    put_table(ROOT / "docs" / "algorithm.md", "control", table)


def row_of(event: str, stages: int, measured: list[OfRank]) -> Row:
    ranks = len(measured)
    sent = [rank.gathered + rank.sent for rank in measured]
    gathered = ranks * measured[0].gathered
    return Row(
        event=event,
        ranks=ranks,
        stages=stages,
        of_first_replica=max(sent[:stages]),
        of_others=max(sent[stages:], default=0),
        received_by_first=gathered + sum(rank.sent for rank in measured),
        received=gathered + measured[0].broadcasts,
        cpu_ms=max(rank.cpu_ms for rank in measured),
        wall_ms=max(rank.wall_ms for rank in measured),
    )


def extrapolated(measured: list[Row], ranks: int) -> Row:
    """Every rank adds as much as now, and each stage of the first replica; broadcasts grow with the stages."""
    largest = measured[-1]
    gathered = largest.of_others
    own = largest.received_by_first - largest.ranks * gathered
    long = largest.received - largest.ranks * gathered - FIRST_BROADCAST
    cases = np.array([[1.0, row.ranks, row.stages] for row in measured])
    start, of_rank, of_stage = np.linalg.lstsq(cases, np.array([row.cpu_ms for row in measured]))[0].tolist()
    return Row(
        event=largest.event,
        ranks=ranks,
        stages=STAGES_OF_LARGE,
        of_first_replica=largest.of_first_replica,
        of_others=gathered,
        received_by_first=round(ranks * gathered + own * (STAGES_OF_LARGE - 1) / (largest.stages - 1)),
        received=round(ranks * gathered + FIRST_BROADCAST + max(0, long) * STAGES_OF_LARGE / largest.stages),
        cpu_ms=max(largest.cpu_ms, start + max(0.0, of_rank) * ranks + max(0.0, of_stage) * STAGES_OF_LARGE),
    )


def table_of(events: list[str], rows: list[Row]) -> str:
    """Bytes and times, one line for each event."""
    sizes = (CASES[0][0], CASES[-1][0], *LARGE)
    head = ["sent by a rank of one replica", "by another", *(f"{n:,} ranks: rank 0 gets, processor" for n in sizes)]
    lines = [f"| | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for event in events:
        by_size = {row.ranks: row for row in rows if row.event == event}
        largest = by_size[CASES[-1][0]]
        cells = [kilobytes(largest.of_first_replica), f"{largest.of_others} B"]
        cells += [f"{kilobytes(by_size[n].received_by_first)}, {by_size[n].cpu_ms:,.0f} ms" for n in sizes]
        lines.append(f"| {event} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kilobytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:,.1f} KB" if count < 1 << 20 else f"{count / (1 << 20):,.1f} MB"


# --- on the ranks --------------------------------------------------------------------------------------------


def measure(folder: str, stages: int) -> dict[str, OfRank]:
    """Each event's cost on this rank. Called on all ranks at once."""
    collectives = CountedCollectives()
    controller = trained(collectives, folder, stages)
    return {name: cost(collectives, event) for name, event in events_of(controller, collectives).items()}


def cost(collectives: CountedCollectives, event: Callable[[], Any]) -> OfRank:
    """Bytes of the first time, median ms of all."""
    wall, cpu = [], []
    for repeat in range(REPEATS + 1):
        dist.barrier()
        collectives.clear()
        start, start_cpu = time.perf_counter(), time.process_time()
        event()
        wall.append((time.perf_counter() - start) * 1e3)
        cpu.append((time.process_time() - start_cpu) * 1e3)
        if repeat == 0:
            counted = collectives.gathered, collectives.sent, collectives.broadcasts
    return OfRank(*counted, wall_ms=statistics.median(wall[1:]), cpu_ms=statistics.median(cpu[1:]))


def trained(collectives: CountedCollectives, folder: str, stages: int) -> Controller:
    """A controller in stable freezing, with monitored and stable steps behind it."""
    schedule = one_forward_one_backward(stages, MICROBATCHES)
    stage, clock = collectives.rank % stages, SyntheticClock()
    names = [f"model.layers.{layer}.mlp.linear_{number}.weight" for layer in range(4) for number in range(TENSORS // 4)]
    every = {s: {name: torch.nn.Parameter(torch.ones(4)) for name in names} for s in range(stages)}
    config = TimelyFreezeConfig(
        warmup_steps=0,
        monitoring_steps=2 * TRACED + 2,
        monitoring_precision=1e-9,
        progressive_steps=0,
        replan_threshold=0.001,
        on_error="raise",
        output_dir=folder,
    )
    pipeline = HostPipeline(
        HOST,
        schedule,
        {s: tensor_units(parameters) for s, parameters in every.items()},
        {stage: every[stage]},
        traced=collectives.rank < stages,
        clock=clock,
    )
    controller = Controller(config, pipeline, collectives, RunReporter(collectives))
    random = np.random.default_rng(collectives.rank)
    run_steps(controller, clock, random, 2 * TRACED)
    measured = controller._decisions.plan_maker.measure(schedule, controller.timer)
    controller.state.measure(measured)
    force_plan(controller, 0.5)
    run_steps(controller, clock, random, TRACED)
    return controller


def run_steps(controller: Controller, clock: SyntheticClock, random: np.random.Generator, steps: int) -> None:
    """Steps whose actions take what they are said to, with 3% of noise, and up to a millisecond between them."""
    (stage,) = controller.parameter_masks
    for _ in range(steps):
        controller.begin_step()
        for action in controller.schedule.ranks[stage]:
            clock.now += float(random.uniform(0.0, 1.0))
            with controller.running(action):
                share = controller.mask(stage, action.microbatch).share if action.freezable else 0.0
                clock.now += MS[action.kind] * (1.0 - 0.5 * share) * float(random.normal(1.0, 0.03))
        controller.end_step()


def events_of(controller: Controller, collectives: CountedCollectives) -> dict[str, Callable[[], Any]]:
    """Everything that is sent, each as the controller or an adapter does it."""
    config, schedule, timer = controller.config, controller.schedule, controller.timer
    masks, pipeline = controller.masks, controller.pipeline
    (stage,) = controller.parameter_masks
    units = controller.pipeline.units
    executed = schedule.ranks[stage]
    maker = PlanMaker(config, collectives, pipeline, masks, probes=dict)
    watch = PlanWatch(config, collectives, pipeline, masks, probes=dict)
    measured = controller.state.measured
    plan = solve(maker._problem(schedule, measured)) if collectives.rank == 0 else None
    assert controller.state.plan is not None
    in_force = controller.state.plan
    reporter = RunReporter(collectives)
    return {
        "attach: settings": lambda: agree_on_settings(collectives, HOST, lambda: config),
        "attach: units": lambda: gather_units(collectives, lambda: {stage: tuple(units[stage])}),
        "first step: order": lambda: verify_schedule(collectives, schedule, executed),
        "monitoring: precision": lambda: maker.precision(schedule, timer),
        "monitoring: times": lambda: maker.measure(schedule, timer),
        "plan: not there yet": lambda: on_one_rank(collectives, lambda: None),
        "plan": lambda: on_one_rank(collectives, lambda: plan),
        "look at the plan": lambda: watch.look(schedule, timer, measured, in_force),
        "report": lambda: reporter.report(controller.snapshot()),
    }


if __name__ == "__main__":
    main()
