"""Messages between ranks that freezing causes, event by event, on synthetic steps: see control.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tf_adapters.collectives import ProcessGroupCollectives, on_one_rank
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.hosts.agreement import agree_on_settings, gather_units
from tf_adapters.planner.solve import solve
from tf_adapters.report.observer import RunReporter
from tf_adapters.schedule.ir import Kind
from tf_adapters.schedule.orders import one_forward_one_backward
from tf_adapters.selection.sampling import ParameterPiece
from tf_adapters.selection.stability import StabilityState
from tf_adapters.testing import force_plan
from tf_adapters.testing.plans import tensor_units
from tf_adapters.training.controller import Controller
from tf_adapters.training.pipeline import HostInfo, HostPipeline
from tf_adapters.training.plan_maker import PlanMaker
from tf_adapters.training.replanning import Replanning
from tf_adapters.training.state import for_other_ranks
from tf_adapters.training.tap_findings import TapFindings
from tf_adapters.training.verification import verify_schedule

MICROBATCHES = 64
TENSORS, ELEMENTS = 48, 400_000
TRACED = 32
REPEATS = 5
LEVERS = {"weight_gradients": "deferred", "granularity": "token"}
MS = {Kind.FORWARD: 10.0, Kind.BACKWARD: 20.0, Kind.INPUT_GRAD: 10.0, Kind.WEIGHT_GRAD: 10.0}
FREEZABLE = {Kind.FORWARD: 0.0, Kind.BACKWARD: 0.5, Kind.INPUT_GRAD: 0.0, Kind.WEIGHT_GRAD: 1.0}
WITH_LEVERS = ", deferred tokens"
HOST = HostInfo("synthetic", "0")


class SyntheticClock:
    """A clock that the benchmark moves."""

    device = "cpu"
    now = 0.0

    def mark(self) -> float:
        return self.now

    def elapsed_ms(self, start: float, stop: float) -> float:
        return stop - start

    def synchronize(self) -> None: ...


class CountedCollectives(ProcessGroupCollectives):
    """Collectives that count this rank's bytes.

    ``gathered`` is what each rank adds to what all ranks get, ``sent`` what this one sends besides, ``given`` what
    rank 0 sends each rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gathers = False
        self.clear()

    def clear(self) -> None:
        self.gathered = self.sent = self.given = 0

    def gather(self, value: Any) -> list[Any]:
        self._gathers = True
        try:
            return super().gather(value)
        finally:
            self._gathers = False

    def _gather_bytes(self, content: bytes, width: int) -> list[bytes]:
        self.gathered += width
        return super()._gather_bytes(content, width)

    def _broadcast_bytes(self, content: bytes, length: int, source: int) -> bytes:
        self.given += length
        if self._gathers and self.rank == source:
            self.sent += length
        return super()._broadcast_bytes(content, length, source)

    def _headers_at_first(self, header: bytes) -> list[bytes]:
        self.sent += len(header)
        return super()._headers_at_first(header)

    def _scatter_bytes(self, contents: Sequence[bytes], width: int) -> bytes:
        self.given += width
        return super()._scatter_bytes(contents, width)

    def _send_to_first(self, message: bytes) -> None:
        self.sent += len(message)
        super()._send_to_first(message)


@dataclass(frozen=True)
class OfRank:
    """One event on one rank: bytes as ``CountedCollectives`` counts them, median ms of wall clock and of processor."""

    gathered: int
    sent: int
    given: int
    wall_ms: float
    cpu_ms: float


def measure(folder: str, stages: int, all_events: bool = True) -> dict[str, OfRank]:
    """Each event's cost on this rank, or that of stability checks alone. Called on all ranks at once."""
    collectives = CountedCollectives()
    events = events_of_checks(untrained(collectives, folder, stages))
    if all_events:
        events = events_of(trained(collectives, folder, stages), collectives) | events
        events |= events_with_levers(trained(collectives, folder, stages, LEVERS), collectives)
    return {name: cost(collectives, event) for name, event in events.items()}


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
            counted = collectives.gathered, collectives.sent, collectives.given
    return OfRank(*counted, wall_ms=statistics.median(wall[1:]), cpu_ms=statistics.median(cpu[1:]))


def trained(
    collectives: CountedCollectives, folder: str, stages: int, settings: Mapping[str, Any] = MappingProxyType({})
) -> Controller:
    """A controller in stable freezing, with monitored and stable steps behind it."""
    controller = untrained(collectives, folder, stages, settings)
    clock = controller.pipeline.clock
    assert isinstance(clock, SyntheticClock)
    random = np.random.default_rng(collectives.rank)
    run_steps(controller, clock, random, 2 * TRACED)
    controller.state.measure(*controller._decisions.plan_maker.measure(controller.schedule, TapFindings()))
    force_plan(controller, 0.5)
    run_steps(controller, clock, random, TRACED)
    return controller


def untrained(
    collectives: CountedCollectives, folder: str, stages: int, settings: Mapping[str, Any] = MappingProxyType({})
) -> Controller:
    """A controller of a rank's stage, before its first step."""
    schedule = one_forward_one_backward(stages, MICROBATCHES)
    stage = collectives.rank % stages
    names = [f"model.layers.{layer}.mlp.linear_{number}.weight" for layer in range(4) for number in range(TENSORS // 4)]
    every = {s: {name: torch.nn.Parameter(torch.ones(4)) for name in names} for s in range(stages)}
    weights = ParameterPiece(torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(stage)))
    config = TimelyFreezeConfig(
        method="timely" if settings else "timely+apf",
        warmup_steps=0,
        monitoring_steps=2 * TRACED + 2,
        monitoring_precision=1e-9,
        progressive_steps=0,
        stability_check_interval=1_000,
        replan_threshold=0.001,
        on_error="raise",
        output_dir=folder,
        **settings,
    )
    pipeline = HostPipeline(
        HOST,
        schedule,
        {s: tensor_units(parameters) for s, parameters in every.items()},
        {stage: every[stage]},
        held_values=lambda *_: (weights,),
        traced=collectives.rank < stages,
        clock=SyntheticClock(),
    )
    return Controller(config, pipeline, collectives, RunReporter(collectives))


def run_steps(controller: Controller, clock: SyntheticClock, random: np.random.Generator, steps: int) -> None:
    """Steps whose actions take what they are said to, with 3% of noise, and up to a millisecond between them."""
    (stage,) = controller.parameter_masks
    for _ in range(steps):
        controller.begin_step()
        for action in controller.execution.ranks[stage]:
            clock.now += float(random.uniform(0.0, 1.0))
            with controller.running(action):
                share = controller.mask(stage, action.microbatch).share if action.freezable else 0.0
                noise = float(random.normal(1.0, 0.03))
                if action.kind is Kind.BACKWARD and controller.config.defers:
                    clock.now += MS[Kind.INPUT_GRAD] * noise
                    controller.timer.input_gradients_done()
                    clock.now += MS[Kind.WEIGHT_GRAD] * (1.0 - share) * noise
                else:
                    clock.now += MS[action.kind] * (1.0 - FREEZABLE[action.kind] * share) * noise
        controller.end_step()


def events_of(controller: Controller, collectives: CountedCollectives) -> dict[str, Callable[[], Any]]:
    """Return the events of every run, each as the controller or an adapter does it."""
    config, schedule = controller.config, controller.schedule
    (stage,) = controller.parameter_masks
    units = controller.pipeline.units
    executed = schedule.ranks[stage]
    maker = PlanMaker(controller._setup)
    watch = Replanning(controller._setup)
    known = controller.state.measurement
    plan = solve(maker._problem(known)) if collectives.rank == 0 else None
    assert controller.state.plan is not None
    in_force = controller.state.plan
    reporter = RunReporter(collectives)
    saved = for_other_ranks(controller.state_dict())
    return {
        "attach: settings": lambda: agree_on_settings(collectives, HOST, lambda: config, lambda _: None),
        "attach: units": lambda: gather_units(collectives, lambda: {stage: tuple(units[stage])}),
        "attach: resumed state": lambda: collectives.broadcast(saved),
        "first step: order": lambda: verify_schedule(collectives, schedule, executed),
        "monitoring: precision": lambda: maker.precision(schedule),
        "monitoring: times": lambda: maker.measure(schedule, TapFindings()),
        "plan: not there yet": lambda: on_one_rank(collectives, lambda: None),
        "plan": lambda: on_one_rank(collectives, lambda: plan),
        "look at the plan": lambda: watch.look(known, in_force),
        "report": lambda: reporter.report(controller.view()),
    }


def events_of_checks(controller: Controller) -> dict[str, Callable[[], Any]]:
    """Return the events of stability checks: the first check, and each later one."""
    checks, interval = controller.stability_checks, controller.config.stability_check_interval
    read = checks.run(StabilityState(), 0, 0)
    return {
        "first stability check: who reads": checks._choose_readers,
        "stability check, `timely+apf`": lambda: checks.run(read, interval, 0),
    }


def events_with_levers(controller: Controller, collectives: CountedCollectives) -> dict[str, Callable[[], Any]]:
    """Return events with larger messages: deferral and sampled tokens are on."""
    schedule = controller.schedule
    (stage,) = controller.parameter_masks
    maker = PlanMaker(controller._setup)
    watch = Replanning(controller._setup)
    known, in_force = controller.state.measurement, controller.state.plan
    assert in_force is not None
    assert in_force.schedule is not None
    ordered, executed = in_force.schedule, in_force.schedule.ranks[stage]
    reporter = RunReporter(collectives)
    events: dict[str, Callable[[], Any]] = {
        "first deferred step: order": lambda: verify_schedule(collectives, ordered, executed),
        "monitoring: times": lambda: maker.measure(schedule, TapFindings()),
        "plan": lambda: on_one_rank(collectives, lambda: in_force),
        "look at the plan": lambda: watch.look(known, in_force),
        "report": lambda: reporter.report(controller.view()),
    }
    return {f"{name}{'' if 'deferred' in name else WITH_LEVERS}": event for name, event in events.items()}
