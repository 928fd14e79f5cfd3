"""The paper's schedules on several GPUs, over NCCL: every way and the host alone, step by step in turn.

``benchmarks/paper/tables.py`` measures the same on emulated devices; here layers of LLaMA 3.2 1B compute.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

from benchmarks.gpu.parts import WAYS, Check, Options, Part, no_gpu
from benchmarks.gpu.pipeline import LLAMA_1B, SCHEDULES, TINY, Training
from tf_adapters.testing.paired import in_rotation

ALONE = "host alone"


def missing(options: Options) -> str | None:
    """Several GPUs."""
    if options.cuda and torch.cuda.is_available() and torch.cuda.device_count() < 2:
        return "one GPU only"
    return no_gpu(options)


def ranks(options: Options) -> int:
    return min(8, torch.cuda.device_count()) if options.cuda else 2


def run(options: Options) -> list[Check]:
    """Speedups from plans that were made of measured times, planned and measured, schedule by schedule."""
    return [check for schedule in SCHEDULES for check in of_schedule(options, schedule)]


def of_schedule(options: Options, schedule: str) -> list[Check]:
    phases = {"warmup_steps": 3, "monitoring_steps": 4 if options.tiny else 40, "progressive_steps": 0}
    size = replace(TINY, layers=2) if options.tiny else LLAMA_1B
    trainings = {name: Training(options, size, schedule=schedule) for name in (ALONE, *WAYS)}
    for name, settings in WAYS.items():
        trainings[name].attach(**phases, output_dir=f"{options.folder}/several/{schedule}/{name}", **settings)
    before = sum(phases.values())
    rounds = []
    for number in range(before + (3 if options.tiny else 30)):
        times = in_rotation({name: training.step for name, training in trainings.items()}, number)
        if number > before:
            rounds.append(times)
    checks = [Check(f"step, {schedule}, host alone", statistics.median(times[ALONE] for times in rounds), "ms")]
    for name in WAYS:
        speedup = statistics.median(times[ALONE] / times[name] for times in rounds)
        checks += of_way(f"{schedule}, {name}", trainings[name], speedup)
    return checks


def of_way(name: str, training: Training, speedup: float) -> list[Check]:
    controller = training.adapter.controller
    forecast, plan = controller.forecast, controller.state.plan
    training.detach()
    failures = Check(f"failures, {name}", float(plan is None or controller.state.failure is not None), most=0)
    if plan is None:
        return [failures]
    return [
        failures,
        Check(f"mean freeze ratio, {name}", plan.mean_freeze_ratio),
        Check(f"planned speedup, {name}", forecast.unfrozen_ms / forecast.planned_ms),
        Check(f"measured speedup, {name}", speedup),
    ]


PART = Part("several GPUs over NCCL: the paper's schedules on real layers", run, missing, ranks)
