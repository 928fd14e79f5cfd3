"""Two processes on one GPU, a stage each: 1F1B, times from events, plans from measured times, a plan made anew."""

from __future__ import annotations

import statistics
from typing import Any

import torch.distributed as dist

from benchmarks.gpu.parts import WAYS, Check, Options, Part, no_gpu
from benchmarks.gpu.pipeline import LLAMA_1B, TINY, Training, smaller
from benchmarks.gpu.transfers import through_host_memory
from tf_adapters.measuring.phase import Phase

COMPARED = 4  # steps at freeze ratio 0 whose losses are compared
MONITORED: dict[str, Any] = {"warmup_steps": 2, "monitoring_steps": 12, "progressive_steps": 2, "replan_interval": 4}
STABLE, MOST_STEPS = 8, 120
THRESHOLD = 0.25


def run(options: Options) -> list[Check]:
    """Each way: the host's losses at ratio 0; then a whole run with real times, and a stage that gets slower."""
    with through_host_memory():
        alone = losses(training(options))
        checks = []
        for name, settings in WAYS.items():
            attached = training(options)
            attached.attach_planned(0.0, **settings)
            away = max(abs(a - b) / b for a, b in zip(losses(attached), alone, strict=True))
            most = 1e-3 if options.cuda else 0.0  # attention's backward adds up in another order each time
            checks.append(Check(f"losses at ratio 0 away from the host's, {name}", away, most=most))
            attached.detach()
            checks += whole_run(options, name, settings)
    return checks


def training(options: Options) -> Training:
    return Training(options, TINY if options.tiny else smaller(LLAMA_1B, 4))


def losses(of: Training) -> list[float]:
    """The losses of the first steps, on all ranks."""
    found = []
    for _ in range(COMPARED):
        of.step()
        told: list[Any] = [None] * of.ranks
        dist.all_gather_object(told, None if of.loss is None else float(of.loss))
        found.append(told[-1])
    return found


def whole_run(options: Options, name: str, settings: dict[str, Any]) -> list[Check]:
    """Warm-up to stable freezing; then the last stage takes twice as long until there is another plan."""
    running = training(options)
    given = {**MONITORED, "replan_threshold": THRESHOLD, "output_dir": f"{options.folder}/{name}", **settings}
    controller = running.attach(**given).controller
    while controller.phase is not Phase.STABLE and controller.step < MOST_STEPS:
        running.step()
    for _ in range(STABLE):
        running.step()
    first, forecast = controller.state.plan, controller.forecast
    checks = [
        Check(f"a plan from measured times, {name}", float(first is not None), least=1),
        Check(f"failures, {name}", float(controller.state.failure is not None), most=0),
    ]
    if first is None or forecast is None:
        return checks
    controller.timer.drain(wait=True)
    step_ms = statistics.median(controller.timer.steps_ms(Phase.STABLE)[-STABLE:])
    checks += [
        Check(f"mean freeze ratio, {name}", first.mean_freeze_ratio),
        Check(f"planned speedup, {name}", forecast.unfrozen_ms / forecast.planned_ms),
        Check(f"measured speedup, {name}", forecast.unfrozen_ms / step_ms),
    ]
    running.stage.passes = 2 if running.rank == running.ranks - 1 else 1
    last = controller.step + (24 if options.tiny else MOST_STEPS)
    while controller.state.plan is first and controller.step < last:  # the same on every rank
        running.step()
    renewed = float(controller.state.plan is not first)
    running.detach()
    return [*checks, Check(f"a new plan for a slower stage, {name}", renewed, least=1 if options.judged else None)]


PART = Part(
    title="two processes on one GPU: 1F1B, events, planning and replanning",
    run=run,
    missing=no_gpu,
    ranks=lambda options: 2,
    backend="gloo",
)
