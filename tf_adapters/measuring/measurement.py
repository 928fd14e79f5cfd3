"""The measurement of a pipeline: the one value that planner, checkpoint, report and simulation share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tf_adapters.errors import ScheduleError
from tf_adapters.measuring.batch_times import BatchTimes
from tf_adapters.measuring.token_cost import CostPair
from tf_adapters.measuring.transfers import Gaps
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.durations import ActionText, BoundsPair, EdgeText, Order, Time
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.schedule.period import PeriodicDag
from tf_adapters.values import Value

Steps = Literal["meet", "overlap"]


@dataclass(frozen=True)
class Measurement(Value):
    """Times of a batch in ms.

    Attributes:
        schedule: the actions of each pipeline rank, in execution order.
        times: each action's duration, all frozen and nothing frozen. An F or I action computes no weight gradient:
            where its two times differ, it takes the second.
        communication: on edges between stages, from the source's end to the target's start; 0 where absent.
        overhead: what an action's rank spends before it, besides waiting for its input; 0 where absent.
        waits: from the end of ``SendWait.posted`` to the start of ``SendWait.blocked``, an action of another rank. That
            rank has sent a message before, and waits until the message is received.
        token_costs: by stage, the cost of sampled weight gradients, where tokens are sampled.
        unfrozen_step_ms: a whole step with nothing frozen; 0 where not measured.
        other_ms: the part of a step that is not the batch: data, optimizer.
        steps: whether all ranks "meet" between two steps, or steps "overlap": a rank begins the next one while others
            still work.
        between_steps: by rank, from its last action to its first action of the next step, without waits for other
            ranks; 0 where absent. It counts only where steps overlap.
        fitting_microbatches: by rank, how many microbatches fit its memory; empty where not measured.
    """

    schedule: Annotated[Order, Field(alias="ranks")]
    times: Mapping[ActionText, BoundsPair]
    communication: Mapping[EdgeText, Time] = field(default_factory=dict)
    overhead: Mapping[ActionText, Time] = field(default_factory=dict)
    waits: Mapping[EdgeText, Time] = field(default_factory=dict)
    token_costs: Mapping[int, CostPair] = field(default_factory=dict)
    unfrozen_step_ms: Time = 0.0
    other_ms: Time = 0.0
    batch_times: BatchTimes | None = None
    steps: Steps = "meet"
    between_steps: Mapping[Annotated[int, Field(ge=0)], Time] = field(default_factory=dict)
    fitting_microbatches: Mapping[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = field(
        default_factory=dict
    )

    @property
    def overlap(self) -> bool:
        return self.steps == "overlap"

    @property
    def gaps(self) -> Gaps:
        return Gaps(self.communication, self.overhead, self.waits)

    @cached_property
    def dag(self) -> PipelineDag:
        """The graph of a step in the host's order."""
        return self.dag_of(self.schedule, self.gaps)

    def dag_of(self, schedule: PipelineSchedule, gaps: Gaps) -> PipelineDag:
        """Return the graph of a step in another order, with the gaps in that order."""
        dag = PipelineDag.from_schedule(schedule, *gaps)
        return PeriodicDag.of(dag, schedule, self.between_steps) if self.overlap else dag

    @cached_property
    def upper(self) -> dict[Action, float]:
        """Durations with nothing frozen."""
        return {action: bounds.upper for action, bounds in self.times.items()}

    @cached_property
    def span_ms(self) -> float:
        """The pipeline's part of a step in the host's order with nothing frozen: the makespan, or the period."""
        return self.dag.span_ms(self.upper)

    def of_step(self, step_ms: float) -> Measurement:
        """Return this measurement with the time of the whole step, in ms."""
        return replace(self, unfrozen_step_ms=step_ms, other_ms=max(0.0, step_ms - self.span_ms))

    def validate(self) -> Measurement:
        """Return it checked. Raises ScheduleError for a schedule that cannot run, PlanInputError for anything else."""
        self.schedule.validate()
        return self.from_json(dict(vars(self)))

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> Measurement:
        """Check that every action has times and that all keys exist; sort the times in the schedule's order."""
        if not self.times and not self.schedule.ranks:
            return self
        try:
            self.schedule.validate()
        except ScheduleError as error:
            raise ValueError(f"ranks: {error}") from error
        actions = dict.fromkeys(self.schedule.actions)
        _check_known("times", self.times, actions)
        _check_known("overhead", self.overhead, actions)
        _check_known("waits", [action for edge in self.waits for action in edge], actions)
        for action in actions:
            if action not in self.times:
                raise ValueError(f"times: '{action}' is missing: each needs [all frozen, nothing frozen]")
        edges = set(self.schedule.transfers()) if self.communication else set()
        for source, target in self.communication:
            if (source, target) not in edges:
                raise ValueError(f"communication: '{source}->{target}' is not an edge between stages of the schedule")
        last_rank = len(self.schedule.ranks) - 1
        for name in ("between_steps", "fitting_microbatches"):
            for rank in getattr(self, name):
                if rank > last_rank:
                    raise ValueError(f"{name}: {rank} is not a rank: allowed are 0 to {last_rank}")
        if self.waits:
            self.schedule.execution_order(self.waits)
        object.__setattr__(self, "times", {action: self.times[action] for action in actions})
        return self


NOTHING_MEASURED = Measurement(PipelineSchedule(()), {})


def _check_known(name: str, named: Collection[Action], actions: Collection[Action]) -> None:
    for action in named:
        if action not in actions:
            raise ValueError(f"{name}: '{action}' is not an action of the schedule")
