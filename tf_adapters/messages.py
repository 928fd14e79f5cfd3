"""The lines that a user reads while a run goes on, as pure functions."""

from __future__ import annotations

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.ir import PipelineSchedule
from tf_adapters.phases import PhaseSchedule
from tf_adapters.planner import FreezePlan
from tf_adapters.prediction import Forecast


def enabled(host: str, schedule: PipelineSchedule, config: TimelyFreezeConfig, phases: PhaseSchedule) -> str:
    """Freezing is on: where, how much, and what will happen when."""
    return (
        f"enabled: {host}, {schedule.num_stages} stages x {schedule.num_microbatches} microbatches, "
        f"method {config.method}, max freeze ratio {config.max_freeze_ratio:g}; warm-up to step "
        f"{phases.warmup_end}, monitoring to {phases.monitoring_end}, progressive freezing to "
        f"{phases.progressive_end}, then stable freezing"
    )


def monitoring(done: int, length: int, step_ms: float | None) -> str:
    """Progress while monitoring."""
    took = "" if step_ms is None else f", {step_ms:.1f} ms a step"
    return f"monitoring {done}/{length} steps{took}"


def planned(plan: FreezePlan, forecast: Forecast) -> str:
    """What was measured, what is planned, and what it costs in freezing."""
    stages = ", ".join(f"stage {stage}: {ratio:.2f}" for stage, ratio in sorted(plan.stage_freeze_ratio.items()))
    return (
        f"measured {forecast.unfrozen_ms:.1f} ms a step; plan: {forecast.planned_ms:.1f} ms "
        f"({1 / forecast.ratio:.2f}x) at mean freeze ratio {plan.mean_freeze_ratio:.2f} ({stages}); "
        f"{plan.solver.name} {plan.solver.status.value} in {plan.solver.seconds:.2f} s"
    )
