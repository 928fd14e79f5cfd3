"""The lines that a user reads while a run goes on, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.estimates import grouped
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.planner.forecast import Forecast, cost_of_meeting
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.schedule.deferral import most_held, most_in_flight
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.selection.stability import StabilityState
from tf_adapters.training.phases import PhaseSchedule

if TYPE_CHECKING:
    from tf_adapters.training.state import RunState


def enabled(host: str, schedule: PipelineSchedule, config: TimelyFreezeConfig, phases: PhaseSchedule) -> str:
    goal = "" if config.goal is None else f"goal {config.goal} ({meaning(config)}); "
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    size = f"{stages} stage{'' if stages == 1 else 's'} x {microbatches} microbatch{'' if microbatches == 1 else 'es'}"
    size = f"{goal}{host}, {size}, method {config.method}"
    checks = f"stability checks every {config.stability_check_interval} steps"
    if not config.plans:
        return f"enabled: {size}, without a plan; warm-up to step {phases.warmup_end}, then {checks}"
    if config.max_freeze_ratio:
        size += f", max freeze ratio {config.max_freeze_ratio:g}"
    monitored = f"warm-up to step {phases.warmup_end}, monitoring to {phases.monitoring_end}"
    if not config.freezes:
        return f"enabled: {size}; {monitored}, then the {'host alone' if config.method == 'none' else 'plan'}"
    then = f"stable freezing, {checks}" if config.stability_metric else "stable freezing"
    return f"enabled: {size}; {monitored}, progressive freezing to {phases.progressive_end}, then {then}"


def small(schedule: PipelineSchedule, config: TimelyFreezeConfig) -> str | None:
    """Return what a pipeline of one stage or a batch of one microbatch cannot gain; None for a larger one."""
    if schedule.num_stages == 1 and not config.max_freeze_ratio:
        return "one stage waits for no other, so there is nothing to gain here with nothing frozen"
    if schedule.num_stages == 1:
        return "one stage waits for no other: a step is shorter only by the weight gradients that it skips"
    if schedule.num_microbatches == 1:
        return (
            f"a batch of one microbatch keeps {schedule.num_stages - 1} of {schedule.num_stages} stages waiting at all "
            "times: cut it into more microbatches, which gains more"
        )
    return None


def meaning(config: TimelyFreezeConfig) -> str:
    """Return the words for the effect of a run on the model."""
    if config.method == "none":
        return "measures, and leaves the rest to the host"
    if not config.max_freeze_ratio and config.plans:
        if config.defers:
            return "the same bits as without"
        return "the same bits as without, and nothing is deferred; goal paper would shorten steps"
    most = f"up to {config.max_freeze_ratio:.0%} of"
    what = f"samples {most} tokens, unbiased" if config.samples_tokens else f"skips {most} weight gradients"
    return f"{'defers exactly, then ' if config.defers else ''}{what}"


def out_of_reach(target_ms: float, promised: Forecast, max_freeze_ratio: float) -> str:
    asked, most = promised.unfrozen_ms / target_ms, 1.0 / promised.ratio
    return (
        f"a step of {target_ms:.1f} ms ({asked:.2f}x) is out of reach within max_freeze_ratio {max_freeze_ratio:g}: "
        f"the plan is the fastest there is, {promised.planned_ms:.1f} ms ({most:.2f}x)"
    )


def changed(factors: Mapping[tuple[int, Kind], float]) -> str:
    """Actions no longer take as long as the plan says."""
    stages = grouped((stage, f"{kind.value} {factor:.2f}x") for (stage, kind), factor in sorted(factors.items()))
    told = ", ".join(f"stage {stage}: {' '.join(kinds)}" for stage, kinds in stages.items())
    return f"actions take other times than it was made for ({told})"


def phase(config: TimelyFreezeConfig, state: RunState, step: int) -> str:
    """Describe the phase of ``step``. Only runs that may freeze hear of freezing."""
    phases = state.phases
    if not config.plans and step > phases.warmup_end:
        return f"stability checks every {config.stability_check_interval} steps; {config.stability_metric} freezes"
    if phases.phase(step).monitors and not config.monitors_with_masks:
        return "monitoring, nothing frozen" if config.freezes else "monitoring"
    if step <= phases.freezing_start:
        return phases.description(step)
    if config.method == "none" or state.left_to_host:
        return "measured; every step runs as the host alone" if config.method == "none" else "stable, as the host alone"
    if config.freezes and (state.plan is None or state.plan.mean_freeze_ratio):
        return phases.description(step)
    own = state.plan is None or state.plan.schedule in (None, state.schedule)
    return f"stable, {'the order of the host stays' if own else 'the plan runs'}"


def checked(state: StabilityState, config: TimelyFreezeConfig, shares: Mapping[int, float]) -> str:
    """The outcome of a stability check: the share of each stage's work that is stable, and where the scores lie."""
    stages = ", ".join(f"stage {stage}: {share:.2f}" for stage, share in sorted(shares.items()))
    stable = f"stability check {state.checks}: {config.stability_metric} finds stable, by work, {stages}"
    scores = state.memory.get("scores", np.zeros(0))
    if not len(scores):
        return f"{stable}; scores follow with the next"
    low, middle, high = scores.min(), np.median(scores), scores.max()
    return f"{stable}; scores from {low:.2g} to {high:.2g}, median {middle:.2g}"


_WORTH_SAYING = 0.01
"""Share of a step from which the cost of meeting is said."""


_UNCLEAR = (
    "it is not clear whether all ranks meet between steps: their own work there takes longer than the last action of a "
    "batch"
)


def meeting(known: Measurement, plan: FreezePlan, meetings: Sequence[str], is_clear: bool = True) -> str:
    """Say whether the ranks meet between steps, why, and the cost. Empty if that changes next to nothing.

    Without ``is_clear`` the measurement does not show it. A plan for steps that overlap is then a trial.
    """
    if plan.period_ms is not None and not is_clear:
        return f"{_UNCLEAR}. A trial of a few steps shows whether a plan for ranks that do not meet is faster"
    if plan.period_ms is not None:
        return (
            f"ranks do not meet between steps: as planned, a new step begins every {plan.period_ms.planned:.1f} ms, "
            f"and a batch takes {plan.makespan_ms.planned:.1f} ms from its first action to its last"
        )
    cost = cost_of_meeting(known, plan)
    if cost <= _WORTH_SAYING * plan.makespan_ms.planned:
        return ""
    if not is_clear:
        return f"{_UNCLEAR}. If they do, this costs {cost:.1f} ms of each step"
    why = ", ".join(meetings) or "a norm over all gradients, a reduced loss or a barrier in the training loop"
    return f"all ranks meet between steps, which costs {cost:.1f} ms of each step; what makes them meet: {why}"


def filled_memory(known: Measurement, plan: FreezePlan) -> str:
    """Say how many microbatches each rank holds, and how many fit its memory."""
    if not known.fitting_microbatches:
        return (
            'extra_microbatches "auto": how much memory is free for tensors is not known here, so no rank holds more '
            "microbatches than the host's fullest; set memory_limit, in GiB for each rank"
        )
    order = plan.schedule or known.schedule
    held = ", ".join(
        f"rank {rank}: {most_held(order.ranks[rank])} of {fitting}"
        for rank, fitting in known.fitting_microbatches.items()
    )
    return f'extra_microbatches "auto": microbatches held at most, of those that fit the memory: {held}'


def saved_memory(config: TimelyFreezeConfig, host: PipelineSchedule, plan: FreezePlan, promised: Forecast) -> str:
    """Say what a limit below the memory of the host's order costs."""
    order = plan.schedule or host
    limit = f"memory_limit {config.memory_limit:g}" if config.memory_limit else ""
    limit = limit or f"extra_microbatches {config.extra_microbatches}"
    moved = any(_forwards(one) != _forwards(other) for one, other in zip(order.ranks, host.ranks, strict=True))
    dropout = "; the stages of a rank take turns in another order, so dropout draws other numbers" if moved else ""
    return (
        f"{limit}: a rank holds {most_in_flight(order)} microbatches at most, in the host's order "
        f"{most_in_flight(host)}; a step takes {promised.planned_ms:.1f} ms as planned, {promised.unfrozen_ms:.1f} ms "
        f"in the host's order; no control steps run, since they would need the host's memory{dropout}"
    )


def _forwards(row: Sequence[Action]) -> list[Action]:
    return [action for action in row if action.kind is Kind.FORWARD]


def with_more_memory(more: int, plans: tuple[FreezePlan, FreezePlan], promised: Forecast) -> str:
    """Say what ``more`` microbatches in memory would bring. ``plans`` are the one in force and the one with them."""
    held = [max(map(most_held, plan.schedule.ranks)) for plan in plans if plan.schedule]
    memory = f", and ranks hold {held[1]} microbatches at most instead of {held[0]}" if len(held) == 2 else ""
    return f"with extra_microbatches {more} a step would take {promised.planned_ms:.1f} ms, with the same bits{memory}"


def planned(plan: FreezePlan, forecast: Forecast, host_ms: float) -> str:
    """Say the planned time of a step, its gain over ``host_ms`` of the warm-up unless 0, and its ratios."""
    stages = ", ".join(f"stage {stage}: {ratio:.2f}" for stage, ratio in sorted(plan.stage_freeze_ratio.items()))
    ratios = f" at mean freeze ratio {plan.mean_freeze_ratio:.2f} ({stages})" if plan.mean_freeze_ratio else ""
    gain = ""
    if host_ms and forecast.planned_ms > 0.0:
        speed = host_ms / forecast.planned_ms
        warm_up = f"the host alone in the warm-up ({host_ms:.1f} ms; control steps measure the speed more precisely)"
        gain = f", {speed:.2f}x as fast as {warm_up}"
    return (
        f"measured {forecast.unfrozen_ms:.1f} ms a step while monitoring; "
        f"plan: {forecast.planned_ms:.1f} ms{ratios}{gain}; "
        f"solver {plan.solver.name}: {plan.solver.status.value}, {plan.solver.seconds:.2f} s"
    )
