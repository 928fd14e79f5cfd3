"""A batch in an order that a plan has rewritten, as an instruction stream for DeepSpeed's engine.

The engine's sends wait for their receiver. Any order can then stop for ever where both neighbours send, so here sends
are started and waited for at the end of the batch; receives come right before their action.
Source: deepspeed/runtime/pipe/engine.py, schedule.py and p2p.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as host

from tf_adapters.overrides import Overrides
from tf_adapters.schedule.ir import Action, Kind

__all__ = [
    "BATCH_ENDING",
    "FinishSends",
    "InputGradients",
    "OrderedSchedule",
    "Sends",
    "WeightGradients",
    "another_buffer",
]


class InputGradients(host.BufferOpInstruction):  # type: ignore[misc]
    """A backward that leaves the weight gradients which can wait."""


class WeightGradients(host.PipeInstruction):  # type: ignore[misc]
    """The weight gradients that a microbatch (``microbatch``) has left."""


class FinishSends(host.PipeInstruction):  # type: ignore[misc]
    """Wait until everything that was sent has arrived."""


BATCH_ENDING = (host.ReduceTiedGrads, host.ReduceGrads, host.OptimizerStep)


class OrderedSchedule(host.PipeSchedule):  # type: ignore[misc]
    """The instructions of one stage for its row of an order, in which sends are started only."""

    ending: tuple[type[host.PipeInstruction], ...] = (FinishSends, *BATCH_ENDING)

    def __init__(self, row: tuple[Action, ...], micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__(micro_batches=micro_batches, stages=stages, stage_id=stage_id)
        self._row, self._buffers = row, _buffers(row)

    def steps(self) -> Iterator[list[host.PipeInstruction]]:
        """Yield the instructions of each action, then those that end the batch."""
        for action in self._row:
            if action.kind is Kind.WEIGHT_GRAD:
                yield [WeightGradients(microbatch=action.microbatch)]
            else:
                yield list(self._instructions(action, self._buffers[action.microbatch]))
        yield [instruction() for instruction in self.ending]

    def num_pipe_buffers(self) -> int:
        """As many as microbatches are between their forward and their input gradient at once."""
        return max(self._buffers.values()) + 1

    def _instructions(self, action: Action, buffer: int) -> Iterator[host.PipeInstruction]:
        if action.kind is Kind.FORWARD:
            if not self.is_first_stage:
                yield host.RecvActivation(buffer)
            if self.is_first_stage or self.is_last_stage:
                yield host.LoadMicroBatch(buffer)
            yield host.ForwardPass(buffer)
            if not self.is_last_stage:
                yield host.SendActivation(buffer)
            return
        if not self.is_last_stage:
            yield host.RecvGrad(buffer)
        yield InputGradients(buffer) if action.kind is Kind.INPUT_GRAD else host.BackwardPass(buffer)
        if not self.is_first_stage:
            yield host.SendGrad(buffer)


def _buffers(row: tuple[Action, ...]) -> dict[int, int]:
    """A buffer for each microbatch, free again after its (input) gradient."""
    free: list[int] = []
    buffers: dict[int, int] = {}
    made = 0
    for action in row:
        if action.kind is Kind.FORWARD:
            if not free:
                free.append(made)
                made += 1
            buffers[action.microbatch] = free.pop()
        elif action.kind is not Kind.WEIGHT_GRAD:
            free.append(buffers[action.microbatch])
    return buffers


def another_buffer(received: Any) -> Any:
    """A buffer like the one that gradients were received in: weight gradients may still be made from that one."""
    if isinstance(received, torch.Tensor):
        return torch.empty_like(received)
    return [torch.empty_like(tensor) for tensor in received]


class Sends:
    """Sends that do not wait for their receivers; what is sent is kept until it has arrived."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, torch.Tensor]] = []

    def wrap(self, instruction: Callable[..., None]) -> Callable[..., None]:
        """An instruction of the engine whose sends are started only."""

        def run(engine: Any, *args: Any, **kwargs: Any) -> None:
            with Overrides() as overrides:
                overrides.set(p2p, "send", self._send)
                instruction(engine, *args, **kwargs)

        return run

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _let_go(self) -> None:
        """What has arrived is no longer kept; what failed raises."""
        under_way, self._under_way = self._under_way, []
        for work, tensor in under_way:
            if work.is_completed():
                work.wait()
            else:
                self._under_way.append((work, tensor))

    def _send(self, tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> None:
        p2p._is_valid_send_recv(p2p._grid.get_stage_id(), dest_stage)
        self._let_go()
        # Not by deepspeed.comm.isend, which waits for its receiver in releases before 0.19.8.
        work = dist.isend(tensor, p2p._grid.stage_to_global(stage_id=dest_stage))
        self._under_way.append((work, tensor))
