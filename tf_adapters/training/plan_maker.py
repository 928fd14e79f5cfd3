"""From measured steps to a plan, on all ranks at once: measured on every rank, solved on rank 0, then broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tf_adapters.collectives import Collectives, decide_from_all, on_one_rank
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.batch_times import BatchTimes, batch_times, with_replicas
from tf_adapters.measuring.compact import PackedBounds, PackedTraces
from tf_adapters.measuring.freeze_response import Group, StageTimes, measured_times
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.replicas import merge_bounds, slowest_durations
from tf_adapters.measuring.timer import ActionTimer
from tf_adapters.measuring.token_cost import TokenCost, slowest_cost, slowest_costs
from tf_adapters.measuring.transfers import NO_GAPS, Gaps, complete_steps, local_traces, measure_gaps
from tf_adapters.planner.forecast import Forecast, forecast
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.frontier import SOLVES
from tf_adapters.planner.learning import Learning, Probe
from tf_adapters.planner.problem import PlanProblem, most_of_a_microbatch
from tf_adapters.planner.solve import solve
from tf_adapters.planner.worker import BackgroundPlan
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.selection.masks import StageMasks
from tf_adapters.training import messages
from tf_adapters.training.pipeline import HostPipeline
from tf_adapters.training.tap_findings import TapFindings

__all__ = ["NOTHING_MEASURED", "Measured", "PlanMaker", "Planned", "Probes", "RunSetup", "other_ms"]

_SOLVED_AT_ONCE = 1_000
"""Actions up to which planning takes about a second, no more than starting a process for it."""

_NEARLY = 1.01
"""Up to this ratio to its target a promised step has reached it: measurements are no more precise."""


Probes = Callable[[], Mapping[int, Sequence[Probe]]]


@dataclass(frozen=True)
class RunSetup:
    """What a run's decisions are made with.

    Attributes:
        config: the settings.
        collectives: the group of all ranks that train together.
        pipeline: the pipeline that the host runs.
        masks: the masks of every stage.
        probes: this rank's newest probes of its gradients' noise, by stage.
        taps: what the first step found out about the taps; None before, and where there are none.
    """

    config: TimelyFreezeConfig
    collectives: Collectives
    pipeline: HostPipeline
    masks: StageMasks
    probes: Probes
    taps: Callable[[], TapFindings | None] = lambda: None

    def learning(
        self, schedule: PipelineSchedule, ranks: Sequence[Mapping[int, Sequence[Probe]]], costs: Mapping[int, TokenCost]
    ) -> Learning | None:
        """From the probes of all ranks; None where a stage has none. ``costs`` are by stage, where tokens are drawn."""
        batch = schedule.num_microbatches * self.pipeline.replicas
        return Learning.measured(ranks, batch, costs, self.pipeline.adaptive)


@dataclass(frozen=True)
class Measured:
    """What a plan is made from; times in ms. ``notes`` name bounds that noise had crossed and that were clamped.

    ``token_costs`` are by stage, where tokens are sampled. ``learning`` is there where ``max_freeze_ratio`` is "auto"
    and gradients of single microbatches could be seen. ``other_ms`` is what a step takes besides the batch, ``longer``
    how many times as long it takes as the step whose target the settings may name: it has other microbatches.
    ``batch_times`` is where the ranks' time in a batch goes.
    """

    bounds: Mapping[Action, Bounds]
    gaps: Gaps
    unfrozen_step_ms: float
    notes: tuple[str, ...] = ()
    token_costs: Mapping[int, TokenCost] = field(default_factory=dict)
    learning: Learning | None = None
    other_ms: float = 0.0
    longer: float = 1.0
    batch_times: BatchTimes | None = None

    def target_ms(self, config: TimelyFreezeConfig) -> float:
        """The settings' target for the step; 0 without one."""
        return config.target_ms(self.unfrozen_step_ms / self.longer) * self.longer


NOTHING_MEASURED = Measured({}, NO_GAPS, 0.0)


@dataclass(frozen=True)
class Planned:
    """A plan, and what it promises for a whole step, in ms."""

    plan: FreezePlan
    step_ms: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Local:
    """What one rank sends of its monitored steps.

    A rank of the traced pipeline sends bounds and traces of each action, any other the mean bounds of its groups.
    ``typical_ms`` tells a slow replica.
    """

    step_ms: float
    typical_ms: Mapping[Group, float]
    token_costs: Mapping[int, TokenCost]
    probes: Mapping[int, Sequence[Probe]]
    means: Mapping[Group, Bounds] = field(default_factory=dict)
    bounds: PackedBounds | None = None
    traces: PackedTraces | None = None


class PlanMaker:
    """Makes the plan of a run. Every method is called on all ranks at the same point."""

    def __init__(self, run: RunSetup) -> None:
        self._run, self._config, self._collectives = run, run.config, run.collectives
        self._worker: BackgroundPlan | None = None  # on rank 0
        self._steps: Sequence[Mapping[Action, float]] = ()  # durations, ms; on rank 0
        self._waited = 0  # steps, for the plan

    def precision(self, schedule: PipelineSchedule, timer: ActionTimer) -> float:
        """Standard error of what this run's plan would be made from now: the worst of all ranks, in shares.

        From what devices have finished. Waiting for them would empty their queues, and only the steps that follow a
        look, which freeze nothing, would start slowly.
        """

        def local() -> float:
            timer.drain()
            return self._times(schedule, timer).error

        return decide_from_all(self._collectives, local, lambda errors: max(errors))

    def measure(self, schedule: PipelineSchedule, timer: ActionTimer) -> Measured:
        """What the monitored steps of all ranks say. Raises TimelyFreezeError, the same on every rank."""

        findings = self._run.taps() or TapFindings()

        def merge(ranks: Sequence[_Local]) -> tuple[PackedBounds, Measured]:
            detailed = [rank.bounds.unpack(schedule) for rank in ranks if rank.bounds]
            bounds, notes = merge_bounds(schedule, detailed, [rank.means for rank in ranks])
            bounds = findings.without_overhead(bounds)
            steps = complete_steps(schedule, [rank.traces.unpack(schedule) for rank in ranks if rank.traces])
            self._steps, gaps = slowest_durations(steps, detailed, bounds), measure_gaps(schedule, steps)
            step_ms = max(rank.step_ms for rank in ranks)
            costs = slowest_costs([rank.token_costs for rank in ranks])
            learning = self._run.learning(schedule, [rank.probes for rank in ranks], costs)
            traced = batch_times(schedule, steps, gaps)
            dag = PipelineDag.from_schedule(schedule, *gaps)
            typical = [(rank, local.typical_ms) for rank, local in enumerate(ranks)]
            fresh = Measured(
                {},
                gaps,
                step_ms,
                notes=notes,
                token_costs=costs,
                learning=learning,
                other_ms=max(0.0, step_ms - dag.makespan(_upper(bounds))),
                batch_times=traced and with_replicas(traced, dag, _upper(bounds), typical),
            )
            return PackedBounds.of(schedule, bounds), fresh

        packed, measured = decide_from_all(self._collectives, lambda: self._local(schedule, timer), merge)
        return replace(measured, bounds=packed.unpack(schedule))

    def start(self, schedule: PipelineSchedule, measured: Measured) -> Planned | None:
        """Make the plan, or begin to: None where it is made beside training. Raises TimelyFreezeError on all ranks."""
        self.close()
        self._waited = 0
        solves = SOLVES if self._config.is_auto else 1
        if len(schedule.actions) * solves <= _SOLVED_AT_ONCE:

            def solve_here() -> Planned:
                plan = solve(self._problem(schedule, measured), self._config.solver_time_limit_s)
                return self._promise(schedule, measured, plan)

            return on_one_rank(self._collectives, solve_here)

        def launch() -> None:
            self._worker = BackgroundPlan(self._problem(schedule, measured), self._config.solver_time_limit_s)

        on_one_rank(self._collectives, launch)
        return None

    def poll(self, schedule: PipelineSchedule, measured: Measured) -> Planned | None:
        """The plan, if it is there. Called after every step; it looks ever more rarely, since looking is a broadcast.

        Raises TimelyFreezeError on all ranks when there will be none.
        """
        self._waited += 1
        due = self._waited % max(1, self._waited // 8) == 0
        return self._arrived(schedule, measured) if due else None

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _local(self, schedule: PipelineSchedule, timer: ActionTimer) -> _Local:
        timer.drain(wait=True)
        times, number = self._times(schedule, timer), schedule.num_microbatches
        step_ms = timer.step_ms(Phase.MONITORING_UPPER, number) or 0.0
        if not self._run.pipeline.traced:
            return _Local(step_ms, times.typical_ms(), times.token_costs, self._run.probes(), means=times.means())
        return _Local(
            step_ms,
            times.typical_ms(),
            times.token_costs,
            self._run.probes(),
            bounds=PackedBounds.of(schedule, times.bounds()),
            traces=PackedTraces.of(schedule, local_traces(timer, Phase.MONITORING_UPPER, number)),
        )

    def _times(self, schedule: PipelineSchedule, timer: ActionTimer) -> StageTimes:
        sampled, number = self._config.samples_tokens, schedule.num_microbatches
        first = self._run.masks.first_training_stage
        return measured_times(timer, first, sampled=sampled, microbatches=number)

    def _arrived(self, schedule: PipelineSchedule, measured: Measured) -> Planned | None:
        def ask() -> Planned | None:
            assert self._worker is not None
            plan = self._worker.poll()
            return None if plan is None else self._promise(schedule, measured, plan)

        return on_one_rank(self._collectives, ask)

    def _problem(self, schedule: PipelineSchedule, measured: Measured) -> PlanProblem:
        learning = measured.learning and replace(measured.learning, other_ms=measured.other_ms)
        return PlanProblem(
            schedule=schedule,
            times=measured.bounds,
            max_freeze_ratio=0.0 if self._config.is_auto and learning is None else self._config.stage_limit,
            **measured.gaps._asdict(),
            target_makespan_ms=self._target_makespan(schedule, measured),
            token_cost=slowest_cost(measured.token_costs.values()),
            max_microbatch_freeze_ratio=most_of_a_microbatch(self._config.stage_limit),
            defer=self._config.defers,
            extra_microbatches=self._config.extra_microbatches,
            moves_forwards=self._run.pipeline.moves_forwards,
            learning=learning,
        )

    def _target_makespan(self, schedule: PipelineSchedule, measured: Measured) -> float:
        """The settings' target for a step, less what is no part of the pipeline; 0 without a target."""
        target = measured.target_ms(self._config)
        saved = measured.unfrozen_step_ms - target
        return max(0.0, _unfrozen_makespan(schedule, measured) - saved) if target else 0.0

    def _promise(self, schedule: PipelineSchedule, measured: Measured, plan: FreezePlan) -> Planned:
        step_ms = measured.unfrozen_step_ms
        promised = forecast(
            schedule,
            plan,
            bounds=measured.bounds,
            unfrozen_step_ms=step_ms,
            gaps=measured.gaps,
            steps=self._steps,
            stage_0_vanishes=self._run.masks.can_freeze_all(0),
        )
        self._steps = ()
        return Planned(plan, promised.planned_ms, tuple(self._notes(measured, promised, plan)))

    def _notes(self, measured: Measured, promised: Forecast, plan: FreezePlan) -> Iterator[str]:
        """What the settings ask for and the plan does not reach, and why it freezes what it freezes."""
        target = measured.target_ms(self._config)
        if target and promised.planned_ms > target * _NEARLY and not self._config.is_auto:
            yield messages.out_of_reach(target, promised, self._config.stage_limit)
        if self._config.is_auto and not plan.frontier:
            yield (
                "max_freeze_ratio auto: nothing is frozen, since the gradients of single microbatches cannot be seen "
                "here, so that what freezing costs is not known"
            )


def other_ms(schedule: PipelineSchedule, measured: Measured) -> float:
    """What a step takes besides the batch, ms: data, optimizer."""
    return max(0.0, measured.unfrozen_step_ms - _unfrozen_makespan(schedule, measured))


def _upper(bounds: Mapping[Action, Bounds]) -> dict[Action, float]:
    """Durations in ms with nothing frozen."""
    return {action: of_action.upper for action, of_action in bounds.items()}


def _unfrozen_makespan(schedule: PipelineSchedule, measured: Measured) -> float:
    """A batch in the host's order with nothing frozen, ms."""
    dag = PipelineDag.from_schedule(schedule, *measured.gaps)
    return dag.makespan(_upper(measured.bounds))
