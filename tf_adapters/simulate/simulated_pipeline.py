"""The subject of a simulation: a schedule with the times of its actions, also taken from the times of stages."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from tf_adapters.errors import ConfigError
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.transfers import Gaps
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.simulate.model_costs import StageCost

__all__ = ["Pipeline", "between_ranks", "carried_gaps", "recut", "stage_times"]

_NOTHING = StageCost(0.0, 0.0, 0.0)


class Pipeline(NamedTuple):
    """A measured or assumed pipeline, with a name."""

    name: str
    measurement: Measurement

    @property
    def schedule(self) -> PipelineSchedule:
        return self.measurement.schedule


def between_ranks(schedule: PipelineSchedule, ms: float) -> Gaps:
    """``ms`` on every edge whose ends are on different ranks; a rank hands over to itself at once."""
    edges = [(source, target) for target, source in schedule.received.items()]
    return Gaps(dict.fromkeys(edges, ms) if ms > 0.0 else {})


def carried_gaps(measured: Measurement, order: PipelineSchedule) -> Gaps:
    """The mean gaps of a measured pipeline in another order of its model.

    A hand-over between ranks takes what it takes on average; so does what a rank spends before a forward, and before a
    backward. Weight gradients that are computed apart wait for nobody and count as started at once.
    """
    edges, known = between_ranks(measured.schedule, 1.0).communication, measured.communication
    communication = between_ranks(order, fmean(known.get(edge, 0.0) for edge in edges) if edges else 0.0).communication
    spent = {forward: _mean_overhead(measured, forward) for forward in (True, False)}
    overhead = {
        action: spent[action.kind is Kind.FORWARD] for action in order.before if action.kind is not Kind.WEIGHT_GRAD
    }
    return Gaps(communication, {action: ms for action, ms in overhead.items() if ms > 0.0})


def _mean_overhead(measured: Measurement, forward: bool) -> float:
    values = [
        ms
        for action, ms in measured.overhead.items()
        if (action.kind is Kind.FORWARD) is forward and action.kind is not Kind.WEIGHT_GRAD
    ]
    return fmean(values) if values else 0.0


def stage_times(measured: Measurement) -> tuple[StageCost, ...]:
    """Mean ms of each stage's parts over its microbatches: what another schedule of the same stages would take.

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
    """The same model in another number of stages: pieces are cut into equal parts, or neighbours are joined.

    Raises ConfigError unless one of the two numbers is a multiple of the other.
    """
    if stages % len(pieces) == 0:
        parts = stages // len(pieces)
        return tuple(piece.scaled(1.0 / parts) for piece in pieces for _ in range(parts))
    if len(pieces) % stages == 0:
        joined = len(pieces) // stages
        return tuple(sum(pieces[first : first + joined], _NOTHING) for first in range(0, len(pieces), joined))
    raise ConfigError(
        f"times of {len(pieces)} stages cannot become those of {stages}: one must be a multiple of the other"
    )
