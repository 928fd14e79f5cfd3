"""Run a batch in a plan's order, as an instruction stream for DeepSpeed's engine.

The engine's sends wait for their receiver, so some orders would deadlock where both neighbours send. Here a send
begins after its action, and the rank waits for it at the end of the batch. Receives begin when ``schedule.messages``
says, because NCCL runs the transfers between two ranks one after the other, in the order in which each began them.
Source: deepspeed/runtime/pipe/engine.py, schedule.py and p2p.py.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as host

from tf_adapters.hosts.sent import SentMessages
from tf_adapters.overrides import Overrides
from tf_adapters.schedule.ir import Action, Kind


class InputGradients(host.BufferOpInstruction):  # type: ignore[misc]
    """A backward without the weight gradients that can wait."""


class WeightGradients(host.PipeInstruction):  # type: ignore[misc]
    """The deferred weight gradients of a microbatch (``stage``, ``microbatch``)."""


class BeginReceive(host.PipeInstruction):  # type: ignore[misc]
    """Begin to receive the input of an action (``action``)."""


class FinishSends(host.PipeInstruction):  # type: ignore[misc]
    """Wait until all sent messages have arrived."""


TRANSFERS = (host.SendActivation, host.RecvActivation, host.SendGrad, host.RecvGrad)
BATCH_ENDING = (host.ReduceTiedGrads, host.ReduceGrads, host.OptimizerStep)


class OrderedSchedule(host.PipeSchedule):  # type: ignore[misc]
    """The instructions of one stage for its row of an order.

    ``receives`` maps an action to the actions whose inputs begin to be received before it.
    """

    ending: tuple[type[host.PipeInstruction], ...] = (FinishSends, *BATCH_ENDING)

    def __init__(
        self,
        row: tuple[Action, ...],
        micro_batches: int,
        stages: int,
        stage_id: int,
        *,
        receives: Mapping[Action, tuple[Action, ...]] | None = None,
    ) -> None:
        super().__init__(micro_batches=micro_batches, stages=stages, stage_id=stage_id)
        self._row, self._buffers, self._receives = row, _buffers(row), receives or {}

    def steps(self) -> Iterator[list[host.PipeInstruction]]:
        """Yield the instructions of each action, then the instructions that end the batch."""
        for action in self._row:
            if action in self._receives:
                yield [BeginReceive(action=target) for target in self._receives[action]]
            if action.kind is Kind.WEIGHT_GRAD:
                yield [WeightGradients(stage=action.stage, microbatch=action.microbatch)]
            else:
                yield list(self._instructions(action, self._buffers[action.microbatch]))
        yield [instruction() for instruction in self.ending]

    def num_pipe_buffers(self) -> int:
        """Return the largest number of microbatches that are between forward and input gradient at one time."""
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
    """Assign a buffer to each microbatch. Its backward or input gradient frees the buffer."""
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


_BUFFER = {host.RecvActivation: "pipe_recv_buf", host.RecvGrad: "grad_layer"}
"""The engine's attribute with the receive buffer of each instruction."""

_WITH_THE_NEXT = (host.SendActivation, host.RecvGrad)


class Transfers:
    """The transfers of one batch. None of them blocks its rank when it begins.

    A sent tensor is kept until it has arrived. Either its transfer says so, or a later message from its receiver
    implies it. For the second case, ``taken`` maps an action to a number of messages from this rank: those that the
    sender of the action's input had received before it sent that input (``schedule.messages``). The engine must know
    the shapes of received tensors.
    """

    def __init__(self, engine: Any, taken: Mapping[Action, int]) -> None:
        self._engine, self._taken = engine, taken
        self._sent: defaultdict[int, SentMessages] = defaultdict(SentMessages)  # by the stage they go to
        self._coming: defaultdict[type, deque[tuple[Action, Any, list[Any]]]] = defaultdict(deque)

    def begin_receive(self, action: Action) -> None:
        """Begin to receive the input of an action, in the order in which its neighbour sends."""
        engine, forward = self._engine, action.kind is Kind.FORWARD
        instruction = host.RecvActivation if forward else host.RecvGrad
        source = p2p._grid.stage_to_global(stage_id=engine.prev_stage if forward else engine.next_stage)
        # New buffers: more than one message may be coming, and earlier ones may still be in use.
        like = getattr(engine, _BUFFER[instruction])
        buffers = torch.empty_like(like) if torch.is_tensor(like) else type(like)(map(torch.empty_like, like))
        works = [dist.irecv(buffer, source) for buffer in ([buffers] if torch.is_tensor(buffers) else buffers)]
        self._coming[instruction].append((action, buffers, works))

    def run(self, instruction: type, call: Callable[[], None], **place: int) -> None:
        """Run an engine's instruction: its sends only begin, and its receives finish one that has begun."""
        with self._of(instruction):
            call()

    @contextmanager
    def _of(self, instruction: type) -> Iterator[None]:
        works: list[Any] = []
        message: list[tuple[Any, torch.Tensor]] = []
        neighbour = self._engine.next_stage if instruction in _WITH_THE_NEXT else self._engine.prev_stage

        def receive(tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> None:
            works.pop(0).wait()  # on a device only the stream waits

        def send(tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> None:
            p2p._is_valid_send_recv(p2p._grid.get_stage_id(), dest_stage)
            # Not by deepspeed.comm.isend, which waits for its receiver in releases before 0.19.8.
            message.append((dist.isend(tensor, p2p._grid.stage_to_global(stage_id=dest_stage)), tensor))

        if instruction in _BUFFER:
            action, buffers, works = self._coming[instruction].popleft()
            setattr(self._engine, _BUFFER[instruction], buffers)
        with Overrides() as overrides:
            overrides.set(p2p, "send", send)
            overrides.set(p2p, "recv", receive)
            yield
        if instruction in _BUFFER:
            self._sent[neighbour].let_go(self._taken.get(action, 0))
        else:
            self._sent[neighbour].keep(message)

    def finish(self) -> None:
        """Wait until all sent messages have arrived."""
        for sent in self._sent.values():
            sent.finish()
