"""From measured steps to a plan, on all ranks at once: measured on every rank, solved on rank 0, then broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tf_adapters.collectives import Collectives, decide_from_all, on_one_rank
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.errors import PlanInputError, TimelyFreezeError
from tf_adapters.measuring.batch_times import batch_times, with_replicas
from tf_adapters.measuring.between_steps import between_steps
from tf_adapters.measuring.compact import PackedBounds, PackedTraces
from tf_adapters.measuring.estimates import merged
from tf_adapters.measuring.freeze_response import Group, StageTimes, measured_times
from tf_adapters.measuring.measurement import NOTHING_MEASURED, Measurement
from tf_adapters.measuring.memory import MemoryMeter
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.replica_bounds import merge_bounds, slowest_durations
from tf_adapters.measuring.timer import ActionTimer
from tf_adapters.measuring.token_cost import TokenCost, slower_cost
from tf_adapters.measuring.transfers import complete_steps, local_traces, measure_gaps
from tf_adapters.planner.deferred import saves_memory
from tf_adapters.planner.forecast import Forecast, forecast
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.planner.worker import BackgroundPlan
from tf_adapters.schedule.deferral import most_held
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.selection.masks import StageMasks
from tf_adapters.training import log_lines
from tf_adapters.training.pipeline import HostPipeline
from tf_adapters.training.tap_findings import TapFindings

_SOLVED_AT_ONCE = 1_000
"""Actions up to which planning takes about a second, no more than starting a process for it."""

_NEARLY = 1.01
"""Up to this ratio to its target a promised step has reached it: measurements are no more precise."""

_WORTH_MEMORY = 0.02
"""Share of a step from which it is said what more microbatches in memory would save."""


@dataclass(frozen=True)
class RunSetup:
    """The parts of a run that its decisions need."""

    config: TimelyFreezeConfig
    collectives: Collectives
    pipeline: HostPipeline
    masks: StageMasks
    timer: ActionTimer
    memory: MemoryMeter


@dataclass(frozen=True)
class PlanJob:
    """A plan to make: from what, and, where one is in force already, why it is made anew."""

    measurement: Measurement
    reason: str = ""


@dataclass(frozen=True)
class Planned:
    """A plan, and what it promises for a whole step, in ms."""

    plan: FreezePlan
    step_ms: float
    notes: tuple[str, ...] = ()


class MonitoredSteps(NamedTuple):
    """The measurement of the monitored steps, and a sentence for each bound that noise had crossed.

    ``own_times`` is empty, or by rank its own time between steps in ms, if it is not clear whether ranks meet there.
    """

    known: Measurement
    notes: tuple[str, ...]
    own_times: Mapping[int, float]

    @property
    def overlapping(self) -> Measurement:
        """The measurement for ranks that do not meet."""
        known = replace(self.known, steps="overlap", between_steps=self.own_times)
        return known.of_step(known.unfrozen_step_ms)


@dataclass(frozen=True)
class _Local:
    """The message of one rank about its monitored steps.

    A rank of the traced pipeline sends bounds and traces of each action, any other the mean bounds of its groups.
    ``typical_ms`` tells a slow replica. ``fitting`` is how many microbatches fit the memory of this rank, if known.
    ``needed_bytes`` is the lowest limit of memory that this rank can keep, if the given one is lower.
    """

    step_ms: float
    typical_ms: Mapping[Group, float]
    token_costs: Mapping[int, TokenCost]
    rank: int  # of the pipeline
    fitting: int | None = None
    needed_bytes: float | None = None
    means: Mapping[Group, Bounds] = field(default_factory=dict)
    bounds: PackedBounds | None = None
    traces: PackedTraces | None = None


class PlanMaker:
    """Makes the plan of a run. Every method is called on all ranks at the same point."""

    def __init__(self, run: RunSetup) -> None:
        self._run, self._config, self._collectives = run, run.config, run.collectives
        self.keeps_forwards = False  # whether forwards keep the host's order relative to backwards
        self.keeps_stages = False  # whether the stages of a rank keep the host's order relative to each other
        self.job: PlanJob | None = None  # whose plan is being made
        self._worker: BackgroundPlan | None = None  # on rank 0
        self._steps: Sequence[Mapping[Action, float]] = ()  # durations, ms; on rank 0
        self._waited = 0  # steps, for the plan

    def precision(self, schedule: PipelineSchedule) -> float:
        """Return the relative standard error of the times from which a plan would now be made.

        It is the largest of all ranks. Only times that devices have finished count. Waiting for devices would empty
        their queues. Steps after a look freeze nothing, and only these would then start slowly.
        """

        def local() -> float:
            self._run.timer.drain()
            return self._times(schedule).error

        return decide_from_all(self._collectives, local, lambda errors: max(errors))

    def measure(self, schedule: PipelineSchedule, findings: TapFindings) -> MonitoredSteps:
        """Return what the monitored steps show. Raises TimelyFreezeError, the same on every rank."""

        def merge(ranks: Sequence[_Local]) -> tuple[Packed, tuple[str, ...], Mapping[int, float]]:
            self._check_memory(ranks)
            detailed = [rank.bounds.unpack(schedule) for rank in ranks if rank.bounds]
            bounds, notes = merge_bounds(schedule, detailed, [rank.means for rank in ranks])
            times = findings.without_overhead(bounds)
            traces = [rank.traces for rank in ranks if rank.traces]
            traced_steps = complete_steps(schedule, [of_rank.unpack(schedule) for of_rank in traces])
            steps = list(traced_steps.values())
            self._steps, gaps = slowest_durations(steps, detailed, times), measure_gaps(schedule, steps)
            costs = merged((rank.token_costs for rank in ranks), slower_cost)
            between = between_steps(schedule, traced_steps, traces)
            known = Measurement(
                schedule,
                times,
                **gaps._asdict(),
                token_costs=costs,
                steps=between.steps,
                between_steps=between.between_steps if between.steps == "overlap" else {},
                fitting_microbatches=_fitting_by_rank(ranks),
            ).of_step(max(rank.step_ms for rank in ranks))
            traced = batch_times(schedule, steps, gaps)
            typical = [(rank, local.typical_ms) for rank, local in enumerate(ranks)]
            if traced:
                known = replace(known, batch_times=with_replicas(traced, known.dag, known.upper, typical))
            return packed(known), notes, {} if between.is_clear else between.between_steps

        known, notes, own_times = decide_from_all(self._collectives, lambda: self._local(schedule), merge)
        return MonitoredSteps(unpacked(known, schedule), notes, own_times)

    def start(self, job: PlanJob) -> Planned | None:
        """Make the plan, or begin to: None where it is made beside training. Raises TimelyFreezeError on all ranks."""
        self.close()
        self.job, self._waited = job, 0
        return self._ended(lambda: self._begin(job))

    def poll(self) -> Planned | None:
        """The plan, if it is there. Called after every step; it looks ever more rarely, since looking is a broadcast.

        Raises TimelyFreezeError on all ranks when there will be none.
        """
        self._waited += 1
        due = self._waited % max(1, self._waited // 8) == 0
        return self._ended(self._arrived) if due else None

    def close(self) -> None:
        self.job = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _ended(self, ask: Callable[[], Planned | None]) -> Planned | None:
        """The job ends with its plan, or with an error."""
        try:
            planned = ask()
        except TimelyFreezeError:
            self.close()
            raise
        if planned is not None:
            self.close()
        return planned

    def _begin(self, job: PlanJob) -> Planned | None:
        known, limit_s = job.measurement, self._config.solver_time_limit_s
        if len(known.schedule.actions) <= _SOLVED_AT_ONCE:
            return on_one_rank(self._collectives, lambda: self._promise(known, solve(self._problem(known), limit_s)))

        def launch() -> None:
            self._worker = BackgroundPlan(self._problem(known), limit_s)

        on_one_rank(self._collectives, launch)
        return None

    def _local(self, schedule: PipelineSchedule) -> _Local:
        timer, number = self._run.timer, schedule.num_microbatches
        timer.drain(wait=True)
        times = self._times(schedule)
        step_ms = timer.step_ms(Phase.MONITORING_UPPER, number) or 0.0
        rank = schedule.rank_of(min(self._run.pipeline.parameters))
        figures = times.typical_ms(), times.token_costs
        local = self._with_memory(_Local(step_ms, *figures, rank=rank), schedule)
        if not self._run.pipeline.traced:
            return replace(local, means=times.means())
        return replace(
            local,
            bounds=PackedBounds.of(schedule, times.bounds()),
            traces=PackedTraces.of(schedule, local_traces(timer, Phase.MONITORING_UPPER, number), timer.until_next()),
        )

    def _with_memory(self, local: _Local, schedule: PipelineSchedule) -> _Local:
        """Add how many microbatches fit the memory of this rank, if the settings ask for that."""
        if not self._config.fills_memory:
            return local
        memory, own = self._run.memory, most_held(schedule.ranks[local.rank])
        fitting = memory.most_microbatches(Phase.MONITORING_UPPER, self._config.memory_limit_bytes, own)
        fewest = len(schedule.stages_of(local.rank)) if self._moves_forwards else own
        needed = None
        if fitting is not None and fitting < fewest:
            needed = memory.needed_bytes(Phase.MONITORING_UPPER, fewest)
        return replace(local, fitting=fitting, needed_bytes=needed)

    @property
    def _moves_forwards(self) -> bool:
        return self._run.pipeline.moves_forwards and not self.keeps_forwards

    def _check_memory(self, ranks: Sequence[_Local]) -> None:
        """Raise PlanInputError if a rank cannot run any order within ``memory_limit``."""
        needed = max(local.needed_bytes or 0.0 for local in ranks)
        if needed:
            least = math.ceil(needed / 2**30 * 1_000) / 1_000
            raise PlanInputError(
                f"{SECTION}.memory_limit is {self._config.memory_limit:g}, and no order of this schedule fits into so "
                f"few GiB: allowed is at least {least:g} GiB"
            )

    def _times(self, schedule: PipelineSchedule) -> StageTimes:
        return measured_times(
            self._run.timer,
            self._run.masks.first_training_stage,
            sampled=self._config.samples_tokens,
            microbatches=schedule.num_microbatches,
        )

    def _arrived(self) -> Planned | None:
        def ask() -> Planned | None:
            assert self._worker is not None
            assert self.job is not None
            plan = self._worker.poll()
            return None if plan is None else self._promise(self.job.measurement, plan)

        return on_one_rank(self._collectives, ask)

    def _problem(self, known: Measurement) -> PlanProblem:
        config, target = self._config, self._config.target_ms(known.unfrozen_step_ms)
        limits = Limits.of_training(
            config.max_freeze_ratio,
            target_makespan_ms=max(0.0, known.span_ms - (known.unfrozen_step_ms - target)) if target else 0.0,
            **config.deferral_limits,
            moves_forwards=self._moves_forwards,
            moves_stages=not self.keeps_stages,
        )
        return PlanProblem(known, limits)

    def _promise(self, known: Measurement, plan: FreezePlan) -> Planned:
        promised = self._forecast(known, plan)
        notes = (*self._notes(known, promised, plan), *self._with_more_memory(known, promised, plan))
        self._steps = ()
        return Planned(plan, promised.planned_ms, notes)

    def _forecast(self, known: Measurement, plan: FreezePlan) -> Forecast:
        return forecast(known, plan, steps=self._steps, stage_0_vanishes=self._run.masks.can_freeze_all(0))

    def _notes(self, known: Measurement, promised: Forecast, plan: FreezePlan) -> Iterator[str]:
        """Say what the settings ask for and the plan does not reach."""
        target = self._config.target_ms(known.unfrozen_step_ms)
        if target and promised.planned_ms > target * _NEARLY:
            yield log_lines.out_of_reach(target, promised, self._config.max_freeze_ratio)
        if self._config.fills_memory:
            yield log_lines.filled_memory(known, plan)
        problem = self._problem(known)
        if problem.limits.defer and saves_memory(problem):
            yield log_lines.saved_memory(self._config, known.schedule, plan, promised)

    def _with_more_memory(self, known: Measurement, promised: Forecast, plan: FreezePlan) -> Iterator[str]:
        """Say how much faster the first exact plan would be with more microbatches in memory, if solved at once."""
        limits, more = self._problem(known).limits, len(known.schedule.ranks)
        later = self.job is None or self.job.reason
        has_more = limits.extra_microbatches or limits.fills_memory
        if later or has_more or not limits.defer or limits.max_freeze_ratio:
            return
        if len(known.schedule.actions) > _SOLVED_AT_ONCE:
            return
        try:
            problem = PlanProblem(known, replace(limits, extra_microbatches=more))
            roomy = solve(problem, self._config.solver_time_limit_s)
        except TimelyFreezeError:  # the plan that was asked for is there
            return
        better = self._forecast(known, roomy)
        if better.planned_ms < (1.0 - _WORTH_MEMORY) * promised.planned_ms:
            yield log_lines.with_more_memory(more, (plan, roomy), better)


def _fitting_by_rank(ranks: Sequence[_Local]) -> dict[int, int]:
    """Return how many microbatches fit each pipeline rank, on the replica with least memory; empty if not all know."""
    found: dict[int, int] = {}
    for local in ranks:
        if local.fitting is None:
            return {}
        found[local.rank] = min(local.fitting, found.get(local.rank, local.fitting))
    return dict(sorted(found.items()))


Packed = tuple[PackedBounds, Measurement]
"""A measurement as ranks send it: its times as arrays, and all else."""


def packed(known: Measurement) -> Packed:
    times = PackedBounds.of(known.schedule, known.times)
    return times, replace(known, schedule=NOTHING_MEASURED.schedule, times={})


def unpacked(of: Packed, schedule: PipelineSchedule) -> Measurement:
    times, known = of
    return replace(known, schedule=schedule, times=times.unpack(schedule))
