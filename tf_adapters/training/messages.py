"""The lines that a user reads while a run goes on, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.planner.forecast import Forecast
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.selection.stability import StabilityState
from tf_adapters.training.phases import PhaseSchedule


def enabled(host: str, schedule: PipelineSchedule, config: TimelyFreezeConfig, phases: PhaseSchedule) -> str:
    """Freezing is on: where, how much, and what will happen when."""
    size = f"{host}, {schedule.num_stages} stages x {schedule.num_microbatches} microbatches, method {config.method}"
    checks = f"stability checks every {config.stability_check_interval} steps"
    if not config.plans:
        return f"enabled: {size}, without a plan; warm-up to step {phases.warmup_end}, then {checks}"
    then = f"stable freezing, {checks}" if config.stability_metric else "stable freezing"
    most = "auto" if config.is_auto else f"{config.stage_limit:g}"
    return (
        f"enabled: {size}, max freeze ratio {most}; warm-up to step "
        f"{phases.warmup_end}, monitoring to {phases.monitoring_end}, progressive freezing to "
        f"{phases.progressive_end}, then {then}"
    )


def out_of_reach(target_ms: float, promised: Forecast, max_freeze_ratio: float) -> str:
    """The settings ask for a faster step than the budget allows."""
    asked, most = promised.unfrozen_ms / target_ms, 1.0 / promised.ratio
    return (
        f"a step of {target_ms:.1f} ms ({asked:.2f}x) is out of reach within max_freeze_ratio {max_freeze_ratio:g}: "
        f"the plan is the fastest there is, {promised.planned_ms:.1f} ms ({most:.2f}x)"
    )


def unseen_gradients() -> str:
    """The gradients of single microbatches cannot be seen."""
    return (
        "max_freeze_ratio auto: nothing is frozen, since the gradients of single microbatches cannot be seen here, so "
        "that what freezing costs is not known"
    )


def pays_otherwise(chosen: float, better: float) -> str:
    """Another plan pays more than the one in force."""
    return f"the gradients' noise has changed: freezing {better:.2f} pays more than {chosen:.2f}"


def changed(factors: Mapping[tuple[int, Kind], float]) -> str:
    """Actions no longer take as long as the plan says."""
    stages: dict[int, list[str]] = {}
    for (stage, kind), factor in sorted(factors.items()):
        stages.setdefault(stage, []).append(f"{kind.value} {factor:.2f}x")
    told = ", ".join(f"stage {stage}: {' '.join(kinds)}" for stage, kinds in stages.items())
    return f"actions take other times than it was made for ({told})"


def phase(config: TimelyFreezeConfig, phases: PhaseSchedule, step: int) -> str:
    """What happens in the phase of ``step``."""
    if not config.plans and step > phases.warmup_end:
        return checking(config)
    if config.method == "none" and step > phases.freezing_start:
        return "planned; method none freezes nothing"
    return phases.description(step)


def checking(config: TimelyFreezeConfig) -> str:
    """What begins after the warm-up where nothing is planned."""
    return f"stability checks every {config.stability_check_interval} steps; {config.stability_metric} freezes"


def checked(state: StabilityState, config: TimelyFreezeConfig, shares: Mapping[int, float]) -> str:
    """The outcome of a stability check: the share of each stage's work that is stable, and where the scores lie.

    Those only the first rank has.
    """
    stages = ", ".join(f"stage {stage}: {share:.2f}" for stage, share in sorted(shares.items()))
    stable = f"stability check {state.checks}: {config.stability_metric} finds stable, by work, {stages}"
    scores = state.memory.get("scores", np.zeros(0))
    if not len(scores):
        return f"{stable}; scores follow with the next"
    low, middle, high = scores.min(), np.median(scores), scores.max()
    return f"{stable}; scores from {low:.2g} to {high:.2g}, median {middle:.2g}"


def monitoring(done: int, length: int, step_ms: float | None) -> str:
    """Progress while monitoring."""
    took = "" if step_ms is None else f", {step_ms:.1f} ms a step"
    return f"monitoring {done}/{length} steps{took}"


def precise(steps: int, error: float) -> str:
    """Monitoring has seen enough."""
    return f"monitoring ended after {steps} steps: times and savings are known to {error:.1%}"


def memory(held: int, planned: int) -> str:
    """The most bytes at the ends of a rank's actions: measured with nothing frozen, and in the plan's order."""
    return f"memory of the fullest rank: {held / 2**20:,.1f} MiB now, at most {planned / 2**20:,.1f} MiB planned"


def planned(plan: FreezePlan, forecast: Forecast) -> str:
    """What was measured, what is planned, and what it costs in freezing."""
    stages = ", ".join(f"stage {stage}: {ratio:.2f}" for stage, ratio in sorted(plan.stage_freeze_ratio.items()))
    return (
        f"measured {forecast.unfrozen_ms:.1f} ms a step; plan: {forecast.planned_ms:.1f} ms "
        f"({1 / forecast.ratio:.2f}x) at mean freeze ratio {plan.mean_freeze_ratio:.2f} ({stages}); "
        f"{plan.solver.name} {plan.solver.status.value} in {plan.solver.seconds:.2f} s"
    )
