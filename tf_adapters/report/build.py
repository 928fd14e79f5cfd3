"""A report from a live run: what every rank measured, merged on rank 0."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from operator import itemgetter
from statistics import fmean

from tf_adapters import __version__
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.estimates import estimate, grouped, median, merged
from tf_adapters.measuring.layer_times import StageLayers
from tf_adapters.measuring.learning import Learning
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.timer import ActionTimer
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
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.training.pipeline import HostInfo
from tf_adapters.training.snapshot import RunSnapshot

_REPORTED = (Phase.MONITORING_UPPER, Phase.MONITORING_LOWER, Phase.MONITORING_MIXED, Phase.STABLE)
_SINGLE_SAMPLES = 8
"""Most points of an action whose samples all have different freeze ratios."""

Points = tuple[tuple[float, float], ...]
"""(frozen share of the stage's work in [0, 1], ms) of one action in one phase."""
_STATUS: dict[Phase, Status] = {
    Phase.WARMUP: "warmup",
    Phase.MONITORING_UPPER: "monitoring",
    Phase.MONITORING_LOWER: "monitoring",
    Phase.MONITORING_MIXED: "monitoring",
    Phase.PLANNING: "planning",
    Phase.PROGRESSIVE: "progressive",
    Phase.STABLE: "stable",
}


@dataclass(frozen=True, slots=True)
class LocalMeasurements:
    """The measurements of one rank, by phase: median steps in ms, and the points of each freezable action.

    Only ranks of the one replica that is traced have more than steps and memory: the others would say the same.
    ``forward_ms`` holds the medians of stable freezing's forwards.
    ``peak_bytes`` by phase, ``planned_peak_bytes`` and ``stage``, any one of the rank's, are what it held, what it is
    to hold under the plan, and where it is in the pipeline.
    """

    stage: int
    steps: Mapping[str, float | None]
    actions: Mapping[str, Mapping[Action, Points]]
    forward_ms: Mapping[Action, float]
    peak_bytes: Mapping[str, int | None]
    planned_peak_bytes: int | None
    frozen_share: Mapping[int, tuple[float, ...]]
    parameter_freeze_ratio: Mapping[int, Mapping[str, float]]
    layers: Mapping[int, StageLayers]


def local_measurements(run: RunSnapshot) -> LocalMeasurements:
    timer, number, reported = run.timer, _number(run), run.of_most_used()
    timer.drain()
    return LocalMeasurements(
        stage=run.stages[0],
        steps={phase.value: timer.step_ms(phase, number) for phase in _REPORTED},
        actions={phase.value: _points(timer, phase, number) if run.traced else {} for phase in _REPORTED},
        forward_ms=_forwards(timer, number) if run.traced else {},
        peak_bytes={phase.value: run.memory.peak_bytes(phase) for phase in _REPORTED},
        planned_peak_bytes=run.planned_peak_bytes(reported.schedule, reported.state.plan),
        frozen_share=run.tally.frozen_share() if run.traced else {},
        parameter_freeze_ratio=run.tally.parameter_freeze_ratio() if run.traced else {},
        layers=run.layers.times() if run.traced else {},
    )


def build_report(run: RunSnapshot, ranks: Sequence[LocalMeasurements]) -> Report:
    """The report of the run as far as it has come, of the number of microbatches that most steps had."""
    batches, run = _batches(run), run.of_most_used()
    state, known = run.state, run.state.measurement
    times = known.to_json()
    return Report(
        host=Host(name=run.host.name, version=run.host.version, device=run.timer.device),
        versions=_versions(),
        config=run.config.model_dump(),
        schedule=run.schedule,
        status=_status(run),
        note=(*state.notes, *([state.failure] if state.failure else [])),
        step=state.completed_steps,
        phases=Phases(
            warmup_end=state.phases.warmup_end,
            monitoring_end=state.phases.monitoring_end,
            progressive_end=state.phases.progressive_end,
        ),
        **{name: times[name] for name in ("times", *Gaps._fields, "steps", "between_steps") if name in times},
        plan=state.plan,
        measured=_measured(run, ranks),
        frozen_share={str(s): shares for rank in ranks for s, shares in rank.frozen_share.items()},
        parameter_freeze_ratio={str(s): dict(of) for rank in ranks for s, of in rank.parameter_freeze_ratio.items()},
        tapped_share={str(stage): share for stage, share in state.taps.shares.items()} if state.taps else {},
        tokens=_tokens(state.plan, known.token_costs),
        gradient_signal=_signal(known.learning),
        batches=batches,
        layers={str(s): of for rank in ranks for s, of in sorted(rank.layers.items())},
        batch_times=known.batch_times,
    )


def _number(run: RunSnapshot) -> int | None:
    """The number of microbatches whose steps are reported; None for all."""
    batch = run.state.plans.most_used
    return None if batch is None else batch.schedule.num_microbatches


def _batches(run: RunSnapshot) -> dict[str, Batches]:
    plans = run.state.plans.of
    if len(plans) < 2:
        return {}
    return {
        str(number): Batches(steps=of.steps, step_ms_unfrozen=of.unfrozen_step_ms, planned_step_ms=of.planned_step_ms)
        for number, of in sorted(plans.items())
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


def _signal(learning: Learning | None) -> dict[str, tuple[float, float]]:
    return {str(stage): (of.signal, of.error) for stage, of in learning.stages.items()} if learning else {}


def stable_steps_ms(run: RunSnapshot) -> tuple[float, ...]:
    """Durations of this rank's newest steps of stable freezing, ms: those that are reported."""
    return run.timer.steps_ms(Phase.STABLE, _number(run))


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
    """The run's result in one line, with the standard error of the measured step; None before stable freezing."""
    measured, step = report.measured, estimate(stable_steps_ms)
    stable, unfrozen = measured.step_ms_stable, measured.step_ms_unfrozen
    if report.status != "stable" or not stable or not unfrozen or step is None or not measured.planned_step_ms:
        return None
    if report.config.get("method") == "none":
        return f"method none: {stable:.1f} ms a step, nothing frozen; planned {measured.planned_step_ms:.1f} ms"
    error = step.error / step.value if step.value else 0.0
    where = "emulated device, " if report.host.emulated else ""
    return (
        f"{where}stable freezing: {stable:.1f} ms a step over {len(stable_steps_ms)} steps, {unfrozen / stable:.2f}x "
        f"(+-{error:.1%}) of {unfrozen:.1f} ms with nothing frozen; "
        f"planned {measured.planned_step_ms:.1f} ms, {unfrozen / measured.planned_step_ms:.2f}x"
    )


def _forwards(timer: ActionTimer, number: int | None) -> dict[Action, float]:
    medians = {
        action: median(sample.ms for sample in timer.samples(Phase.STABLE, action, number))
        for action in timer.actions(Phase.STABLE)
        if action.kind is Kind.FORWARD
    }
    return {action: ms for action, ms in medians.items() if ms is not None}


def _points(timer: ActionTimer, phase: Phase, number: int | None) -> dict[Action, Points]:
    """One median for each action, or its newest samples where each has a freeze ratio of its own."""
    points: dict[Action, Points] = {}
    for action in timer.actions(phase):
        samples = timer.samples(phase, action, number)
        if action.kind is Kind.FORWARD or not samples:
            continue
        if phase is Phase.MONITORING_MIXED:
            points[action] = tuple((sample.share, sample.ms) for sample in samples[-_SINGLE_SAMPLES:])
        elif (ms := median(sample.ms for sample in samples)) is not None:
            points[action] = ((sum(sample.share for sample in samples) / len(samples), ms),)
    return points


def _measured(run: RunSnapshot, ranks: Sequence[LocalMeasurements]) -> Measured:
    state, expected = run.state, run.state.forecast
    unfrozen = state.measurement.unfrozen_step_ms or _slowest(ranks, Phase.MONITORING_UPPER)
    stable = _slowest(ranks, Phase.STABLE)
    planned = {action: ms for action, ms in state.measurement.upper.items() if ms > 0.0}
    # Each action at its slowest replica; replicas draw the same masks.
    backwards = {phase: merged((rank.actions[phase.value] for rank in ranks), _slower) for phase in _REPORTED}
    return Measured(
        step_ms_unfrozen=unfrozen,
        step_ms_stable=stable,
        step_ratio=stable / unfrozen if stable and unfrozen else None,
        # Measured over planned time of forwards, the median over all ranks.
        forward_pace=median(ms / planned[a] for rank in ranks for a, ms in rank.forward_ms.items() if a in planned),
        planned_step_ms=expected.planned_ms if expected else None,
        planned_ratio=expected.ratio if expected else None,
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
            unfrozen=_fullest(run, [(rank.stage, rank.peak_bytes[Phase.MONITORING_UPPER.value]) for rank in ranks]),
            planned=_fullest(run, [(rank.stage, rank.planned_peak_bytes) for rank in ranks]),
            stable=_fullest(run, [(rank.stage, rank.peak_bytes[Phase.STABLE.value]) for rank in ranks]),
        ),
    )


def _fullest(run: RunSnapshot, of_ranks: Sequence[tuple[int, int | None]]) -> tuple[int, ...] | None:
    """By pipeline rank, the bytes of the replica that holds most; None unless there are some of every rank.

    ``of_ranks`` has a stage of each rank, and its bytes.
    """
    schedule = run.schedule
    peaks: dict[int, int] = {}
    for stage, held in of_ranks:
        row = schedule.rank_of(stage)
        if held is not None:
            peaks[row] = max(held, peaks.get(row, 0))
    return tuple(peaks[row] for row in sorted(peaks)) if len(peaks) == len(schedule.ranks) else None


def _slowest(ranks: Sequence[LocalMeasurements], phase: Phase) -> float | None:
    return max((ms for rank in ranks if (ms := rank.steps[phase.value]) is not None), default=None)


def _slower(one: Points, other: Points) -> Points:
    return tuple(max(pair, key=itemgetter(1)) for pair in zip(one, other, strict=False))


def _mean_by_stage(shares: Mapping[Action, float]) -> dict[str, float]:
    by_stage = grouped((str(action.stage), share) for action, share in sorted(shares.items()))
    return {stage: sum(of_stage) / len(of_stage) for stage, of_stage in by_stage.items()}


def _status(run: RunSnapshot) -> Status:
    state = run.state
    if state.failure:
        return "failed"
    if state.completed_steps == state.phases.freezing_start and state.plan:
        return "planned"
    return _STATUS[state.phases.phase(max(1, state.completed_steps))]


def _versions() -> dict[str, str | None]:
    return {
        "tf_adapters": __version__,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "ortools": metadata.version("ortools"),
    }
