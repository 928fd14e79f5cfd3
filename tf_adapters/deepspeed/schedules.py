"""DeepSpeed's instruction streams as our schedule, and GPipe as an instruction stream for DeepSpeed.

Source: deepspeed/runtime/pipe/schedule.py. An instruction names only a buffer; which microbatch is in it follows
from counting the forwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe import schedule as host

from tf_adapters.deepspeed.execution import BATCH_ENDING, OrderedSchedule
from tf_adapters.deepspeed.stages import stage_of
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


class MicrobatchTracker:
    """Which microbatch each pipeline buffer holds: the n-th ForwardPass of a stage in a batch is microbatch n."""

    def __init__(self) -> None:
        self._forwards: Counter[int] = Counter()
        self._in_buffer: dict[int, int] = {}

    def forward(self, buffer_id: int, phase: int = 0) -> int:
        """A ForwardPass on ``buffer_id``: the microbatch that it runs. Phases (DualPipeV) have buffers of their own."""
        microbatch = self._in_buffer[buffer_id] = self._forwards[phase]
        self._forwards[phase] += 1
        return microbatch

    def backward(self, buffer_id: int) -> int:
        """A BackwardPass on ``buffer_id``: the microbatch whose forward was the buffer's last."""
        return self._in_buffer[buffer_id]


def translate(schedule_type: type[host.PipeSchedule], microbatches: int, stages: int) -> PipelineSchedule:
    """The schedule of all ranks, from the instruction streams that the host would run on each of them."""
    streams = (schedule_type(micro_batches=microbatches, stages=stages, stage_id=s) for s in range(stages))
    return PipelineSchedule(tuple(tuple(_actions(stream)) for stream in streams)).validate()


def _actions(stream: host.PipeSchedule) -> Iterator[Action]:
    tracker = MicrobatchTracker()
    for instructions in stream.steps():
        for instruction in instructions:
            if type(instruction) not in (host.ForwardPass, host.BackwardPass):
                continue
            phase = instruction.kwargs.get("phase", 0)  # of the DualPipeV schedule
            stage = stage_of(stream.stage_id, stream.stages, phase)
            if type(instruction) is host.ForwardPass:
                yield Action(stage, Kind.FORWARD, tracker.forward(instruction.buffer_id, phase))
            else:
                yield Action(stage, Kind.BACKWARD, tracker.backward(instruction.buffer_id))


class GPipeSchedule(OrderedSchedule):
    """All forwards, then all backwards in the same order (GPipe), for DeepSpeed's engine.

    Two stages, three microbatches (time to the right)::

        stage 0   F0 F1 F2          B0 B1 B2
        stage 1      F0 F1 F2 B0 B1 B2

    Every microbatch keeps a buffer of its own until its backward, so activations cost as many microbatches as the
    batch has. The engine must keep the loss of each microbatch until then too; the adapter sees to it. Here each send
    waits for its receiver; once shapes are known the adapter runs the same row with transfers that are begun ahead.
    """

    ending = BATCH_ENDING

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        row = tuple(Action(stage_id, kind, microbatch) for kind in kinds for microbatch in range(micro_batches))
        super().__init__(row, micro_batches, stages=stages, stage_id=stage_id)


SCHEDULES: dict[str, type[host.PipeSchedule]] = {"1f1b": host.TrainSchedule, "gpipe": GPipeSchedule}
"""The schedules that the ``schedule`` setting can put in the place of the engine's own."""


def own_schedule(engine: Any) -> type[host.PipeSchedule]:
    """The schedule that the engine runs by itself. Before 0.19.8 it had no method to ask for it."""
    return type(engine._train_schedule()) if hasattr(engine, "_train_schedule") else host.TrainSchedule
