"""A snapshot of a run, and the protocol of its observers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.layer_times import LayerTimer
from tf_adapters.measuring.memory import MemoryMeter
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.timer import ActionTimer
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.selection.masks import StageMasks
from tf_adapters.training.freeze_ratios import FreezeRatios
from tf_adapters.training.pipeline import HostInfo
from tf_adapters.training.state import RunState
from tf_adapters.training.step_masks import MaskTally

__all__ = ["Observer", "RunSnapshot"]


@dataclass(frozen=True)
class RunSnapshot:
    """One run as one rank sees it. Observers read it and change nothing.

    ``stages`` are this rank's, ascending. ``tally`` counts what the masks drawn on this rank froze. ``traced``: whether
    this rank is in the one replica of the pipeline that is reported in detail.
    """

    config: TimelyFreezeConfig
    host: HostInfo
    schedule: PipelineSchedule
    stages: tuple[int, ...]
    masks: StageMasks
    ratios: FreezeRatios
    state: RunState
    timer: ActionTimer
    memory: MemoryMeter
    layers: LayerTimer
    tally: MaskTally
    traced: bool = True

    def frozen_share(self, step: int, stage: int) -> float:
        """The mean over microbatches of the work that the masks of a step freeze on any stage, in [0, 1]."""
        masks = self.ratios.masks(self.state, step, stage)
        return sum(mask.share for mask in masks) / len(masks) if masks else 0.0

    def planned_peak_bytes(self, host_order: PipelineSchedule, plan: FreezePlan | None) -> int | None:
        """The most that this rank is to hold under a plan; None where the host's own order stays.

        At most: it counts what a microbatch keeps with nothing frozen.
        """
        order = plan.schedule if plan else None
        if order is None or order == host_order:
            return None
        held = self.memory.held(Phase.MONITORING_UPPER)
        return None if held is None else held.peak_bytes(order.ranks[host_order.rank_of(self.stages[0])])

    def of_most_used(self) -> RunSnapshot:
        """Return this run for the number of microbatches that most steps have had since the first plan."""
        batch = self.state.plans.most_used
        if batch is None:
            return self
        return replace(self, schedule=batch.schedule, state=self.state.of_batch(batch))


class Observer(Protocol):
    """Looks at a run. An observer must not raise: training goes on whatever happens to it."""

    def step_ended(self, run: RunSnapshot, step: int) -> None:
        """Called on each rank after each of its steps. The run's state is still the one that the step ran with."""

    def report(self, run: RunSnapshot) -> None:
        """Called on all ranks at the same point, where there is something new to report."""

    def close(self, run: RunSnapshot) -> None:
        """Called on all ranks at the same point: the run is over."""
