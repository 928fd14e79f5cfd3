"""Plans for batches of different numbers of microbatches, all made from the same measured times.

The times of a microbatch's forward and backward do not depend on the number of microbatches. So times that were
monitored with some numbers serve all others, and a host may change the number in every step (dynamic batching).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from tf_adapters.measuring.estimates import grouped
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.memory import MemoryMeter
from tf_adapters.measuring.phase import Phase
from tf_adapters.planner.forecast import Forecast
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.schedule.deferral import first_half
from tf_adapters.schedule.durations import Bounds, Count, Order, Time
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.values import Value

MOST_NUMBERS = 16
"""Numbers of microbatches that have a plan at once."""


@dataclass(frozen=True)
class BatchPlan(Value):
    """The plan for batches of one number of microbatches. ``schedule`` is the host's order.

    ``planned_at`` is the step after which the plan was taken into force. ``steps`` have had this number since then.
    """

    schedule: Order
    plan: FreezePlan
    unfrozen_step_ms: Time
    planned_step_ms: Time
    planned_at: Count
    steps: Count = 0

    @property
    def forecast(self) -> Forecast:
        return Forecast(self.unfrozen_step_ms, self.planned_step_ms)

    @property
    def moves_forwards(self) -> bool:
        """Return whether the plan's order of forwards and input gradients is not the host's, on any rank."""
        order = self.plan.schedule or self.schedule
        pairs = zip(order.ranks, self.schedule.ranks, strict=True)
        return any(
            _forwards_and_input_gradients(planned) != _forwards_and_input_gradients(own) for planned, own in pairs
        )

    def planned_peak_bytes(self, memory: MemoryMeter, stage: int) -> int | None:
        """The most that the rank of ``stage`` is to hold under the plan; None where the host's own order stays.

        At most: it counts what a microbatch keeps with nothing frozen, but no messages in transit.
        """
        order = self.plan.schedule
        if order is None or order == self.schedule:
            return None
        held = memory.held(Phase.MONITORING_UPPER)
        return None if held is None else held.peak_bytes(order.ranks[self.schedule.rank_of(stage)])


def _forwards_and_input_gradients(row: Sequence[Action]) -> list[Action]:
    return [first_half(action) for action in row if action.kind is not Kind.WEIGHT_GRAD]


@dataclass
class BatchPlans:
    """The plans of a run by number of microbatches, the one used last at the end; the same on every rank.

    If there are more than ``MOST_NUMBERS``, the one that was used longest ago is given up.
    """

    of: dict[int, BatchPlan] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.of)

    @property
    def most_used(self) -> BatchPlan | None:
        return max(self.of.values(), key=lambda batch: batch.steps, default=None)

    def has_room(self, microbatches: int, step: int, interval: int) -> bool:
        """Return whether to plan for a number after ``step``. Another one gives way once in ``interval`` steps."""
        newest = max((batch.planned_at for batch in self.of.values()), default=0)
        return microbatches in self.of or len(self.of) < MOST_NUMBERS or step >= newest + interval

    def put(self, batch: BatchPlan) -> None:
        """Take a plan into force. It replaces the last one of the number."""
        number = batch.schedule.num_microbatches
        earlier = self.of.pop(number, None)
        if len(self.of) == MOST_NUMBERS:
            del self.of[next(iter(self.of))]
        self.of[number] = replace(batch, steps=earlier.steps if earlier else 0)

    def used(self, microbatches: int) -> None:
        if (batch := self.of.pop(microbatches, None)) is not None:
            self.of[microbatches] = replace(batch, steps=batch.steps + 1)


def most_seen(monitored: Sequence[PipelineSchedule]) -> PipelineSchedule:
    """Return the newest schedule with the number of microbatches that most monitored steps had.

    If several numbers have equally many steps, the smallest is taken: larger batches contain its microbatches.
    """
    steps = Counter(schedule.num_microbatches for schedule in monitored)
    number = max(steps, key=lambda number: (steps[number], -number))
    return next(schedule for schedule in reversed(monitored) if schedule.num_microbatches == number)


def same_pipeline(one: PipelineSchedule, other: PipelineSchedule) -> bool:
    """Return whether two schedules run the same stages, on the same ranks and in the same kinds of actions."""
    return [{(a.stage, a.kind) for a in row} for row in one.ranks] == [
        {(a.stage, a.kind) for a in row} for row in other.ranks
    ]


def carried_over(known: Measurement, schedule: PipelineSchedule) -> Measurement:
    """The known times as those of another number of microbatches of the same pipeline.

    A microbatch beyond those that are known takes the median of its stage, and so does every transfer. A step
    takes the time of a batch with nothing frozen, plus the time outside of the batch.
    """
    before, number = known.schedule.num_microbatches, schedule.num_microbatches
    if before in (0, number):
        return known if known.schedule is schedule else replace(known, schedule=schedule)
    lower = _medians((action, bounds.lower) for action, bounds in known.times.items())
    upper = _medians(known.upper.items())
    transfer = _medians((target, ms) for (_, target), ms in known.communication.items())
    overhead = _medians(known.overhead.items())
    waits = schedule.send_waits if known.waits else ()
    other = replace(
        known,
        schedule=schedule,
        times={a: known.times.get(a) or Bounds(lower[_group(a)], upper[_group(a)]) for a in schedule.actions},
        communication={(s, t): transfer[_group(t)] for s, t in schedule.transfers() if _group(t) in transfer},
        overhead={action: overhead[_group(action)] for action in schedule.actions if _group(action) in overhead},
        waits={(w.posted, w.blocked): transfer[_group(w.sent[1])] for w in waits},
    )
    return replace(other, unfrozen_step_ms=other.span_ms + known.other_ms)


def _group(action: Action) -> tuple[int, Kind]:
    return action.stage, action.kind


def _medians(of: Iterable[tuple[Action, float]]) -> dict[tuple[int, Kind], float]:
    return {group: median(values) for group, values in grouped((_group(action), ms) for action, ms in of).items()}
