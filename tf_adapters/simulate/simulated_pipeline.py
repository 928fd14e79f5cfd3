"""The pipeline of a simulation: a schedule, with times of its actions that may follow from the times of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from tf_adapters.errors import ConfigError
from tf_adapters.measuring.estimates import grouped
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.transfers import Gaps
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.orders import v_with_whole_backwards
from tf_adapters.simulate.model_costs import StageCost, action_bounds

_NOTHING = StageCost(0.0, 0.0, 0.0)


class Pipeline(NamedTuple):
    """A measured or assumed pipeline, with a name."""

    name: str
    measurement: Measurement

    @property
    def schedule(self) -> PipelineSchedule:
        return self.measurement.schedule


def between_ranks(schedule: PipelineSchedule, ms: float) -> Gaps:
    """Return gaps of ``ms`` on every edge between different ranks. A transfer inside a rank takes no time."""
    edges = [(source, target) for target, source in schedule.received.items()]
    return Gaps(dict.fromkeys(edges, ms) if ms > 0.0 else {})


def carried_gaps(measured: Measurement, order: PipelineSchedule) -> Gaps:
    """Return the mean gaps of a measured pipeline for another order of its model.

    They are the mean transfer between ranks, and the mean overhead before a forward and before a backward. A separate
    weight gradient (W) waits for no other rank, so it gets no overhead.
    """
    edges, known = between_ranks(measured.schedule, 1.0).communication, measured.communication
    communication = between_ranks(order, fmean(known.get(edge, 0.0) for edge in edges) if edges else 0.0).communication
    spent = grouped((a.kind is Kind.FORWARD, ms) for a, ms in measured.overhead.items() if _waits(a))
    means = {forward: fmean(values) for forward, values in spent.items()}
    overhead = {action: means.get(action.kind is Kind.FORWARD, 0.0) for action in order.before if _waits(action)}
    return Gaps(communication, {action: ms for action, ms in overhead.items() if ms > 0.0})


def _waits(action: Action) -> bool:
    return action.kind is not Kind.WEIGHT_GRAD


def stage_times(measured: Measurement) -> tuple[StageCost, ...]:
    """Mean times in ms of each stage's parts over its microbatches, for another schedule of the same stages.

    The time of a backward with everything frozen is its input gradient's. The rest is its weight gradient's.
    """
    schedule = measured.schedule
    sums = [_NOTHING] * schedule.num_stages
    for action, bounds in measured.times.items():
        if action.kind is Kind.FORWARD:
            part = StageCost(bounds.upper, 0.0, 0.0)
        elif action.kind is Kind.INPUT_GRAD:
            part = StageCost(0.0, bounds.upper, 0.0)
        else:
            part = StageCost(0.0, bounds.lower, bounds.upper - bounds.lower)
        sums[action.stage] += part
    return tuple(cost.scaled(1.0 / schedule.num_microbatches) for cost in sums)


def recut(pieces: Sequence[StageCost], stages: int) -> tuple[StageCost, ...]:
    """Cut ``pieces`` into equal parts, or join them. Raises ConfigError unless one number divides the other."""
    if stages % len(pieces) == 0:
        parts = stages // len(pieces)
        return tuple(piece.scaled(1.0 / parts) for piece in pieces for _ in range(parts))
    if len(pieces) % stages == 0:
        joined = len(pieces) // stages
        return tuple(sum(pieces[first : first + joined], _NOTHING) for first in range(0, len(pieces), joined))
    raise ConfigError(
        f"times of {len(pieces)} stages cannot become those of {stages}: one must be a multiple of the other"
    )


def in_v(measured: Measurement) -> Measurement | None:
    """Return the pipeline with two stages on each rank in a V, of half the layers each.

    None if it has one rank, other stages than one on each rank, or split backwards.
    """
    schedule, ranks = measured.schedule, len(measured.schedule.ranks)
    if ranks < 2 or schedule.num_stages != ranks or schedule.splits_backwards:
        return None
    order = v_with_whole_backwards(ranks, schedule.num_microbatches)
    times = action_bounds(order, recut(stage_times(measured), order.num_stages), 1.0)
    gaps = carried_gaps(measured, order)
    return replace(
        measured,
        schedule=order,
        times=times,
        **gaps._asdict(),
        token_costs={},
        batch_times=None,
        fitting_microbatches={},
    )
