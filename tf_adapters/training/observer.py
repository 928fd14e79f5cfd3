"""What may be seen of a run: a snapshot, and whoever looks at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.selection.masks import StageMasks
from tf_adapters.timing.layers import LayerTimer
from tf_adapters.timing.memory import MemoryMeter
from tf_adapters.timing.phase import Phase
from tf_adapters.timing.timer import ActionTimer
from tf_adapters.training.freeze_ratios import FreezeRatios
from tf_adapters.training.pipeline import HostInfo
from tf_adapters.training.state import RunState
from tf_adapters.training.tally import MaskTally

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

    def planned_peak_bytes(self) -> int | None:
        """The most that this rank is to hold in the plan's order; None where the host's own order stays.

        At most: it counts what a microbatch keeps with nothing frozen.
        """
        order = self.state.plan and self.state.plan.schedule
        held = self.memory.held(Phase.MONITORING_UPPER)
        if order is None or order == self.schedule or held is None:
            return None
        return held.peak_bytes(order.ranks[self.schedule.rank_of(self.stages[0])])


class Observer(Protocol):
    """Looks at a run. An observer must not raise: training goes on whatever happens to it."""

    def step_ended(self, run: RunSnapshot, step: int, phase: Phase) -> None:
        """Called on each rank after each of its steps."""

    def report(self, run: RunSnapshot) -> None:
        """Called on all ranks at the same point, where there is something new to report."""

    def close(self, run: RunSnapshot) -> None:
        """Called on all ranks at the same point: the run is over."""
