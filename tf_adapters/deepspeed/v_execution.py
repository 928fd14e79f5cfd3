"""Run a batch of two stages on each rank in a V, as an instruction stream for DeepSpeed's DualPipeV engine.

The engine places the stages and computes them. Its own schedule is DualPipeV, which holds more microbatches than 1F1B
and computes weight gradients in its backwards. Here the order is ours, and transfers begin as in ``execution.py``. The
engine exchanges the shapes of activations before it first sends them. This exchange blocks both ranks. It cannot
deadlock, because all ranks begin their transfers in one sequence (``schedule.messages``). So even the first batch runs
in our order.
Source: deepspeed/runtime/pipe/dualpipev.py and schedule.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as host

from tf_adapters.deepspeed.execution import BATCH_ENDING, BeginReceive, FinishSends, InputGradients, WeightGradients
from tf_adapters.deepspeed.stages import phase_of
from tf_adapters.hosts.sent import SentMessages
from tf_adapters.overrides import Overrides
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.messages import Receives


class VSchedule(host.PipeSchedule):  # type: ignore[misc]
    """The instructions of one rank for its row of an order.

    As in DualPipeV's own schedule, each microbatch has one buffer for each phase.
    """

    def __init__(self, order: PipelineSchedule, receives: Receives, micro_batches: int, rank: int) -> None:
        super().__init__(micro_batches=micro_batches, stages=len(order.ranks), stage_id=rank)
        self._row, self._begun = order.ranks[rank], receives.before
        self._received, self._target = order.received, order.target

    def steps(self) -> Iterator[list[host.PipeInstruction]]:
        """Yield the instructions of each action, then the instructions that end the batch."""
        for action in self._row:
            yield [BeginReceive(action=target) for target in self._begun.get(action, ())]
            yield list(self._instructions(action))
        yield [instruction() for instruction in (FinishSends, *BATCH_ENDING)]

    def num_pipe_buffers(self) -> int:
        return 2 * int(self.micro_batches)

    def _instructions(self, action: Action) -> Iterator[host.PipeInstruction]:
        if action.kind is Kind.WEIGHT_GRAD:
            yield WeightGradients(stage=action.stage, microbatch=action.microbatch)
            return
        buffer, phase = place_of(action, self.stages, self.micro_batches)
        forward = action.kind is Kind.FORWARD
        if action in self._received:
            yield (host.RecvActivation if forward else host.RecvGrad)(buffer, phase=phase)
        if action.kind is Kind.INPUT_GRAD:
            yield InputGradients(buffer, phase=phase)
        elif not forward:
            yield host.BackwardPass(buffer, phase=phase)
        else:
            if action.stage == 0:
                yield host.LoadMicroBatch(buffer)
            yield host.ForwardPass(buffer, phase=phase)
        if self._target.get(action) in self._received:
            yield (host.SendActivation if forward else host.SendGrad)(buffer, phase=phase)


class VTransfers:
    """Begins and ends the transfers of one batch. The engine's own methods choose the tensors."""

    def __init__(self, engine: Any, order: PipelineSchedule, taken: Mapping[Action, int]) -> None:
        self._engine, self._order, self._taken = engine, order, taken
        self._sent: defaultdict[int, SentMessages] = defaultdict(SentMessages)  # by the rank they go to
        self._coming: dict[tuple[type, int], tuple[Action, list[Any]]] = {}  # by instruction and buffer

    def begin_receive(self, action: Action) -> None:
        """Begin to receive the input of an action into new buffers of the engine."""
        engine = self._engine
        buffer, phase = place_of(action, engine.num_stages, engine.micro_batches)
        instruction, receive = (
            (host.RecvActivation, engine._exec_recv_activations)
            if action.kind is Kind.FORWARD
            else (host.RecvGrad, engine._exec_recv_grads)
        )
        works: list[Any] = []

        def begin(op: Any, tensors: list[torch.Tensor], stage: int) -> None:
            source = engine.grid.stage_to_global(stage)
            works.extend(dist.irecv(tensor, source) for tensor in tensors)

        with Overrides() as overrides:
            overrides.set(engine, "_queue_p2p", begin)
            receive(buffer, phase)
        self._coming[instruction, buffer] = action, works

    def run(self, instruction: type, call: Callable[[], None], *, buffer_id: int, phase: int) -> None:
        """Run an instruction that sends, or wait for what an instruction that receives has begun."""
        if instruction in (host.RecvActivation, host.RecvGrad):
            self._wait(*self._coming.pop((instruction, buffer_id)))
        else:
            self._send(call)

    def finish(self) -> None:
        """Wait until all sent messages have arrived."""
        for sent in self._sent.values():
            sent.finish()

    def _wait(self, action: Action, works: list[Any]) -> None:
        for work in works:
            work.wait()  # on a device only the stream waits
        sender = self._order.home[self._order.source[action].stage]
        self._sent[sender].let_go(self._taken.get(action, 0))

    def _send(self, call: Callable[[], None]) -> None:
        engine = self._engine

        def begin(op: Any, tensors: list[torch.Tensor], stage: int) -> None:
            target = engine.grid.stage_to_global(stage)
            message = [(dist.isend(tensor.detach(), target), tensor) for tensor in tensors]
            self._sent[stage].keep(message)

        with Overrides() as overrides:
            overrides.set(engine, "_queue_p2p", begin)
            call()


def place_of(action: Action, ranks: int, microbatches: int) -> tuple[int, int]:
    """Return the buffer and the phase of an action, as DualPipeV's engine counts them."""
    phase = phase_of(action.stage, ranks)
    return phase * microbatches + action.microbatch, phase
