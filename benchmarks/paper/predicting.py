"""The paper's runs as the planner predicts them from the models' FLOPs: settings, the paper's figures, predictions.

Every setting is the paper's (table "Experimental setup") or, where the paper is silent, TorchTitan's default; no
constant was fitted. ``predicted.py`` prints the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.paper.variants import Variant
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.phase import Phase
from tf_adapters.planner.forecast import disappears, planned_dag, stable_durations
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.schedule.orders import named_schedule
from tf_adapters.simulate.model_costs import (
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_13B,
    LlamaShape,
    action_bounds,
    split_layers,
)
from tf_adapters.training.phases import PhaseSchedule

MAX_FREEZE_RATIO = 0.8
SEQUENCES, LENGTH = 2, 1024  # a local batch of 16 in 8 microbatches
SCHEDULES = {"gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "interleaved 1F1B", "zbv": "ZBV"}
FLOPS_PER_MS = 989e9  # an H200's dense bf16 peak; it cancels in every ratio


@dataclass(frozen=True)
class Model:
    """A model as the paper trained it; the paper's phases end at T_w, T_m, T_f, in optimizer steps."""

    name: str
    shape: LlamaShape
    phases: PhaseSchedule
    steps: int


MODELS = {
    "1B": Model("LLaMA-3.2-1B", LLAMA_1B, PhaseSchedule(60, 100, 200), 800),
    "8B": Model("LLaMA-3-8B", LLAMA_8B, PhaseSchedule(160, 200, 250), 2000),
    "13B": Model("LLaMA-2-13B", LLAMA_13B, PhaseSchedule(150, 200, 250), 2000),
}


@dataclass(frozen=True)
class Paper:
    """A row pair of the paper: tokens/s per GPU without freezing and with, gain and freeze ratio in %."""

    unfrozen: float
    timely: float
    gain: float
    freeze_ratio: float


PAPER = {
    ("1B", "gpipe"): Paper(6965, 8821, 26.64, 19.97),
    ("1B", "one_f_one_b"): Paper(7152, 9257, 29.44, 15.53),
    ("1B", "interleaved"): Paper(6800, 8355, 22.87, 37.89),
    ("1B", "zbv"): Paper(7541, 9426, 25.01, 39.65),
    ("8B", "gpipe"): Paper(5737, 7821, 36.33, 35.64),
    ("8B", "one_f_one_b"): Paper(5748, 7867, 36.87, 33.14),
    ("8B", "interleaved"): Paper(6173, 8081, 30.91, 60.07),
    ("8B", "zbv"): Paper(6889, 8939, 29.75, 69.92),
    ("13B", "gpipe"): Paper(3550, 5132, 44.54, 72.18),
    ("13B", "one_f_one_b"): Paper(3917, 5590, 42.72, 69.33),
    ("13B", "interleaved"): Paper(4271, 5775, 35.22, 72.22),
    ("13B", "zbv"): Paper(4660, 5809, 24.67, 63.42),
}


@dataclass(frozen=True)
class Prediction:
    """Gains in throughput and freeze ratios, in %; makespans in ms at the machine's peak."""

    model: str
    schedule: str
    ranks: int
    microbatches: int
    unfrozen_ms: float
    plan_gain: float
    """The planner's own: makespan with nothing frozen over the planned one."""
    stable_gain: float
    """The same with the first stage's backwards gone where it is frozen whole: a step of stable freezing."""
    run_gain: float
    """Over the whole run, warm-up and monitoring included: what the paper's tables report."""
    plan_freeze_ratio: float
    run_freeze_ratio: float


def predict(
    model: str, schedule: str, ranks: int = 4, microbatches: int = 8, variant: Variant | None = None
) -> Prediction:
    """Return the planner's prediction for ``MODELS[model]`` under a schedule of ``schedule.orders``."""
    variant = variant or Variant()
    setting = MODELS[model]
    order = named_schedule(schedule, ranks, microbatches)
    layers = split_layers(setting.shape.num_hidden_layers, order.num_stages, variant.ends)
    costs = variant.options.costs(setting.shape, layers, SEQUENCES, LENGTH)
    bounds = variant.bounds(action_bounds(order, costs, FLOPS_PER_MS))
    solved = plan(order, bounds, MAX_FREEZE_RATIO)
    unfrozen = solved.makespan_ms.unfrozen
    durations = stable_durations(solved.duration_ms, solved.freeze_ratio)
    stable = planned_dag(Measurement(order, bounds), solved).makespan(durations)
    run_ms, run_ratio = run_means(setting, order, bounds, solved)
    return Prediction(
        model=model,
        schedule=schedule,
        ranks=ranks,
        microbatches=microbatches,
        unfrozen_ms=unfrozen,
        plan_gain=gain(unfrozen, solved.makespan_ms.planned),
        stable_gain=gain(unfrozen, stable),
        run_gain=gain(unfrozen, run_ms),
        plan_freeze_ratio=100.0 * solved.mean_freeze_ratio,
        run_freeze_ratio=100.0 * run_ratio,
    )


def gain(before: float, after: float) -> float:
    """Return the gain in throughput between two times, in %."""
    return 100.0 * (before / after - 1.0)


def run_means(
    setting: Model, schedule: PipelineSchedule, bounds: Mapping[Action, Bounds], solved: FreezePlan
) -> tuple[float, float]:
    """Mean makespan in ms and mean freeze ratio of a run of ``setting.steps`` steps, from its phases."""
    dag = PipelineDag.from_schedule(schedule)

    def makespan(ratios: Mapping[Action, float]) -> float:
        return dag.makespan({a: duration(a, bounds[a], ratios.get(a, 0.0)) for a in schedule.actions})

    steps = range(1, setting.phases.progressive_end + 1)
    total = total_ratio = 0.0
    for phase, ramp in ((setting.phases.phase(step), setting.phases.ramp(step)) for step in steps):
        lower = phase is Phase.MONITORING_LOWER
        ratios = {a: 1.0 if lower else ratio * ramp for a, ratio in solved.freeze_ratio.items()}
        total += makespan(ratios)
        total_ratio += 1.0 if lower else solved.mean_freeze_ratio * ramp
    stable = setting.steps - len(steps)
    total += stable * makespan(solved.freeze_ratio)
    total_ratio += stable * solved.mean_freeze_ratio
    return total / setting.steps, total_ratio / setting.steps


def duration(action: Action, bounds: Bounds, ratio: float) -> float:
    """Milliseconds of an action at a freeze ratio."""
    if ratio >= 1.0 and disappears(action):
        return 0.0
    return bounds.upper - ratio * (bounds.upper - bounds.lower)


def frozen_share(setting: Model, stages: float) -> float:
    """Mean freeze ratio of a run whose plan freezes this share of the stages at the budget and no other."""
    total = 0.0
    for step in range(1, setting.steps + 1):
        lower = setting.phases.phase(step) is Phase.MONITORING_LOWER
        total += 1.0 if lower else MAX_FREEZE_RATIO * stages * setting.phases.ramp(step)
    return total / setting.steps
