"""A report from a live run: what every rank measured, merged on rank 0."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from operator import itemgetter
from statistics import fmean

from tf_adapters import __version__
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.control_steps import speedup
from tf_adapters.measuring.estimates import grouped, median, merged
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.token_cost import TokenCost
from tf_adapters.measuring.transfers import Gaps
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.report.schema import (
    BackwardSample,
    Batches,
    Host,
    Measured,
    PeakMemory,
    Phases,
    Report,
    SampledTokens,
    Status,
)
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.training.batches import BatchPlans
from tf_adapters.training.pipeline import HostInfo
from tf_adapters.training.run_view import REPORTED, LocalMeasurements, Points, RunView
from tf_adapters.training.state import RunState

_STATUS: dict[Phase, Status] = {
    Phase.WARMUP: "warmup",
    Phase.MONITORING_UPPER: "monitoring",
    Phase.MONITORING_LOWER: "monitoring",
    Phase.MONITORING_MIXED: "monitoring",
    Phase.PLANNING: "planning",
    Phase.PROGRESSIVE: "progressive",
    Phase.STABLE: "stable",
}


def build_report(run: RunView, ranks: Sequence[LocalMeasurements]) -> Report:
    """The report of the run as far as it has come, of the number of microbatches that most steps had."""
    state = run.state()
    known = state.measurement
    times = known.to_json()
    of_ranks = [note for rank in ranks for note in rank.notes]
    return Report(
        host=Host(name=run.host.name, version=run.host.version, device=run.device),
        versions=_versions(),
        config=run.config.model_dump(),
        schedule=state.schedule,
        status=_status(state),
        note=tuple(dict.fromkeys([*state.notes, *of_ranks, *([state.failure] if state.failure else [])])),
        step=state.completed_steps,
        phases=Phases(
            warmup_end=state.phases.warmup_end,
            monitoring_end=state.phases.monitoring_end,
            progressive_end=state.phases.progressive_end,
        ),
        **{name: times[name] for name in ("times", *Gaps._fields, "steps", "between_steps") if name in times},
        plan=state.plan,
        measured=_measured(state, ranks),
        frozen_share={str(s): shares for rank in ranks for s, shares in rank.frozen_share.items()},
        parameter_freeze_ratio={str(s): dict(of) for rank in ranks for s, of in rank.parameter_freeze_ratio.items()},
        tapped_share={str(stage): share for stage, share in state.taps.shares.items()} if state.taps else {},
        copied_bytes={str(stage): copied for rank in ranks for stage, copied in sorted(rank.copied_bytes.items())},
        compilations=_compilations(ranks),
        tokens=_tokens(state.plan, known.token_costs),
        batches=_batches(state.plans),
        layers={str(s): of for rank in ranks for s, of in sorted(rank.layers.items())},
        batch_times=known.batch_times,
        moves_forwards=run.moves_forwards,
    )


def _compilations(ranks: Sequence[LocalMeasurements]) -> dict[str, int]:
    """Return the counts of the rank that has compiled most since its first step; nothing if no rank compiles."""
    counts = [dict(rank.compilations) for rank in ranks if any(rank.compilations.values())]
    return max(counts, key=lambda of_rank: of_rank["later"], default={})


def _batches(plans: BatchPlans) -> dict[str, Batches]:
    if len(plans.of) < 2:
        return {}
    return {
        str(number): Batches(steps=of.steps, step_ms_unfrozen=of.unfrozen_step_ms, planned_step_ms=of.planned_step_ms)
        for number, of in sorted(plans.of.items())
    }


def _tokens(plan: FreezePlan | None, costs: Mapping[int, TokenCost]) -> dict[str, SampledTokens]:
    if plan is None:
        return {}
    sampled = ((action.stage, ratio) for action, ratio in plan.freeze_ratio.items() if action.stage in costs)
    kept = grouped((stage, costs[stage].kept(ratio)) for stage, ratio in sampled)
    return {
        str(stage): SampledTokens(kept=fmean(shares), fixed=costs[stage].fixed, per_token=costs[stage].per_token)
        for stage, shares in sorted(kept.items())
    }


def disabled_report(host: HostInfo, config: TimelyFreezeConfig, reason: str) -> Report:
    """The report of a run that trains without freezing because its settings say so."""
    return Report(
        host=Host(name=host.name, version=host.version),
        versions=_versions(),
        config=config.model_dump(),
        schedule=PipelineSchedule(()),
        status="disabled",
        note=(reason,),
        step=0,
    )


def result_line(report: Report, stable_steps_ms: Sequence[float]) -> str | None:
    """The run's result in one line; None before the plan is in force."""
    measured = report.measured
    stable, planned = measured.step_ms_stable, measured.planned_step_ms
    if report.status != "stable" or not stable or not planned or not stable_steps_ms:
        return None
    if report.config.get("method") == "none":
        return f"method none: {stable:.1f} ms a step"
    where = "emulated device, " if report.host.emulated else ""
    what = "freezing" if report.freezes else "training"
    return (
        f"{where}stable {what}: {stable:.1f} ms a step over {len(stable_steps_ms)} steps, planned {planned:.1f} ms; "
        f"{report.speed}"
    )


def early_end(report: Report) -> str | None:
    """Say in which phase a run has ended, and what is missing; None if its plan was in force, or if it failed."""
    step, warmup, monitored = report.step, report.phases.warmup_end or 0, report.phases.monitoring_end or 0
    ends = {
        "warmup": f"the warm-up after {step} of {warmup} steps: nothing was measured",
        "monitoring": f"monitoring after {step - warmup} of {monitored - warmup} steps: no plan was made",
        "planning": "planning: the plan was still being made",
        "planned": "planning: the plan was made, and no step has followed it",
        "progressive": f"progressive freezing: the whole plan starts after step {report.phases.progressive_end}",
    }
    return f"ended in {ends[report.status]}" if report.status in ends else None


def _measured(state: RunState, ranks: Sequence[LocalMeasurements]) -> Measured:
    schedule, expected = state.schedule, state.forecast
    controls = _slowest_rank(ranks).controls
    over_host = speedup(controls)
    unfrozen = state.measurement.unfrozen_step_ms or _slowest(ranks, Phase.MONITORING_UPPER)
    stable = _slowest(ranks, Phase.STABLE)
    planned = {action: ms for action, ms in state.measurement.upper.items() if ms > 0.0}
    # Each action at its slowest replica; replicas draw the same masks.
    backwards = {phase: merged((rank.actions[phase.value] for rank in ranks), _slower) for phase in REPORTED}
    return Measured(
        step_ms_unfrozen=unfrozen,
        step_ms_stable=stable,
        step_ratio=stable / unfrozen if stable and unfrozen else None,
        # Measured over planned time of forwards, the median over all ranks.
        forward_pace=median(ms / planned[a] for rank in ranks for a, ms in rank.forward_ms.items() if a in planned),
        planned_step_ms=expected.planned_ms if expected else None,
        planned_ratio=expected.ratio if expected else None,
        host_step_ms=over_host.host_ms if over_host else None,
        speedup=over_host.value if over_host else None,
        speedup_interval=(over_host.low, over_host.high) if over_host else None,
        control_steps=len(controls),
        mean_afr=_mean_by_stage(
            {action: points[0][0] for action, points in backwards[Phase.STABLE].items() if action.freezable}
        ),
        backward_ms=tuple(
            BackwardSample(action=str(action), afr=share, ms=ms, phase=phase.value)
            for phase, of_phase in backwards.items()
            for action, points in sorted(of_phase.items())
            for share, ms in points
        ),
        peak_memory_bytes=PeakMemory(
            unfrozen=_fullest(schedule, ranks, lambda rank: rank.peak_bytes[Phase.MONITORING_UPPER.value]),
            planned=_fullest(schedule, ranks, lambda rank: rank.planned_peak_bytes),
            stable=_fullest(schedule, ranks, lambda rank: rank.peak_bytes[Phase.STABLE.value]),
        ),
    )


def _fullest(
    schedule: PipelineSchedule, ranks: Sequence[LocalMeasurements], held: Callable[[LocalMeasurements], int | None]
) -> tuple[int, ...] | None:
    """By pipeline rank, the bytes of the replica that holds most; None unless there are some of every rank."""
    peaks: dict[int, int] = {}
    for rank in ranks:
        row, of_rank = schedule.rank_of(rank.stage), held(rank)
        if of_rank is not None:
            peaks[row] = max(of_rank, peaks.get(row, 0))
    return tuple(peaks[row] for row in sorted(peaks)) if len(peaks) == len(schedule.ranks) else None


def _slowest_rank(ranks: Sequence[LocalMeasurements]) -> LocalMeasurements:
    return max(ranks, key=lambda rank: rank.steps[Phase.STABLE.value] or 0.0)


def _slowest(ranks: Sequence[LocalMeasurements], phase: Phase) -> float | None:
    return max((ms for rank in ranks if (ms := rank.steps[phase.value]) is not None), default=None)


def _slower(one: Points, other: Points) -> Points:
    return tuple(max(pair, key=itemgetter(1)) for pair in zip(one, other, strict=False))


def _mean_by_stage(shares: Mapping[Action, float]) -> dict[str, float]:
    by_stage = grouped((str(action.stage), share) for action, share in sorted(shares.items()))
    return {stage: sum(of_stage) / len(of_stage) for stage, of_stage in by_stage.items()}


def _status(state: RunState) -> Status:
    if state.failure:
        return "failed"
    if state.completed_steps == state.phases.freezing_start and state.plan:
        return "planned"
    return _STATUS[state.phases.phase(max(1, state.completed_steps))]


def _versions() -> dict[str, str | None]:
    found = {package: metadata.version(package) for package in ("torch", "ortools")}
    return {"tf_adapters": __version__, "python": platform.python_version(), **found}
