"""Translate DeepSpeed's instruction streams to our schedule, and GPipe to an instruction stream.

Source: deepspeed/runtime/pipe/schedule.py. An instruction names only a buffer. The microbatch in it follows
from the number of forwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe import schedule as host

from tf_adapters.deepspeed.execution import BATCH_ENDING
from tf_adapters.deepspeed.stages import stage_of
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


class MicrobatchTracker:
    """Tracks the microbatch in each pipeline buffer: the n-th ForwardPass of a stage in a batch is microbatch n."""

    def __init__(self) -> None:
        self._forwards: Counter[int] = Counter()
        self._in_buffer: dict[int, int] = {}

    def forward(self, buffer_id: int, phase: int = 0) -> int:
        """Return the microbatch of a ForwardPass on ``buffer_id``. Each phase (DualPipeV) has separate buffers."""
        microbatch = self._in_buffer[buffer_id] = self._forwards[phase]
        self._forwards[phase] += 1
        return microbatch

    def backward(self, buffer_id: int) -> int:
        """Return the microbatch of a BackwardPass on ``buffer_id``: that of the buffer's last forward."""
        return self._in_buffer[buffer_id]


def translate(schedule_type: type[host.PipeSchedule], microbatches: int, stages: int) -> PipelineSchedule:
    """Return the schedule of all ranks, from the instruction streams that the host runs on each."""
    streams = (schedule_type(micro_batches=microbatches, stages=stages, stage_id=s) for s in range(stages))
    return PipelineSchedule(tuple(tuple(_actions(stream)) for stream in streams)).validate()


def _actions(stream: host.PipeSchedule) -> Iterator[Action]:
    tracker = MicrobatchTracker()
    for instructions in stream.steps():
        for instruction in instructions:
            if type(instruction) not in (host.ForwardPass, host.BackwardPass):
                continue
            phase = instruction.kwargs.get("phase", 0)  # DualPipeV's schedule has phases
            stage = stage_of(stream.stage_id, stream.stages, phase)
            if type(instruction) is host.ForwardPass:
                yield Action(stage, Kind.FORWARD, tracker.forward(instruction.buffer_id, phase))
            else:
                yield Action(stage, Kind.BACKWARD, tracker.backward(instruction.buffer_id))


class GPipeSchedule(host.PipeSchedule):  # type: ignore[misc]
    """All forwards, then all backwards in the same order (GPipe), for DeepSpeed's engine.

    Two stages, three microbatches, time to the right. ::

        stage 0   F0 F1 F2          B0 B1 B2
        stage 1      F0 F1 F2 B0 B1 B2

    Each microbatch keeps its buffer until its backward, so all microbatches hold activations at once. The
    adapter also keeps the loss of each microbatch until then. In this class each send waits for its receiver. Once
    shapes are known, the adapter runs the same row with transfers that begin early.
    """

    def steps(self) -> Iterator[list[host.PipeInstruction]]:
        """Yield the instructions of each action, then the instructions that end the batch."""
        first, last = self.is_first_stage, self.is_last_stage
        forward = {host.RecvActivation: not first, host.LoadMicroBatch: first or last}
        forward |= {host.ForwardPass: True, host.SendActivation: not last}
        backward = {host.RecvGrad: not last, host.BackwardPass: True, host.SendGrad: not first}
        for instructions in (forward, backward):
            for buffer in range(self.micro_batches):
                yield [instruction(buffer) for instruction, is_needed in instructions.items() if is_needed]
        yield [instruction() for instruction in BATCH_ENDING]

    def num_pipe_buffers(self) -> int:
        return int(self.micro_batches)


SCHEDULES: dict[str, type[host.PipeSchedule]] = {"1f1b": host.TrainSchedule, "gpipe": GPipeSchedule}
"""The schedules that the ``schedule`` setting can choose instead of the engine's."""


def own_schedule(engine: Any) -> type[host.PipeSchedule]:
    """Return the engine's default schedule. Before 0.19.8 the engine had no method for it."""
    return type(engine._train_schedule()) if hasattr(engine, "_train_schedule") else host.TrainSchedule
