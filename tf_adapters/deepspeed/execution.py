"""Run a batch in a plan's order, with the instructions of DeepSpeed's engine.

The engine's sends wait for their receiver, so some orders would deadlock where both neighbours send. Here sends and
receives only begin, when ``hosts.runner`` says. NCCL runs the transfers between two ranks one after the other, in the
order in which each began them.
Source: deepspeed/runtime/pipe/engine.py, dualpipev.py, schedule.py and p2p.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as host

from tf_adapters.deepspeed.stages import phase_of
from tf_adapters.hosts.links import Links, Message, Transfer
from tf_adapters.hosts.runner import RowRunner
from tf_adapters.overrides import Overrides
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


class RunRow(host.PipeInstruction):  # type: ignore[misc]
    """Run the rank's row of an order (``runner``)."""


class InputGradients(host.BufferOpInstruction):  # type: ignore[misc]
    """A backward without the weight gradients that can wait."""


class WeightGradients(host.PipeInstruction):  # type: ignore[misc]
    """The deferred weight gradients of a microbatch (``stage``, ``microbatch``)."""


BATCH_ENDING = (host.ReduceTiedGrads, host.ReduceGrads, host.OptimizerStep)
_BACKWARD = {Kind.BACKWARD: host.BackwardPass, Kind.INPUT_GRAD: InputGradients}


class OrderedSchedule(host.PipeSchedule):  # type: ignore[misc]
    """The instruction stream of a batch in an order."""

    def __init__(self, runner: RowRunner, buffers: int, **size: int) -> None:
        super().__init__(**size)
        self._runner, self._num_buffers = runner, buffers

    def steps(self) -> Iterator[list[host.PipeInstruction]]:
        """Yield the whole row as one instruction, then the instructions that end the batch."""
        yield [RunRow(runner=self._runner)]
        yield [instruction() for instruction in BATCH_ENDING]

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers that the row needs."""
        return self._num_buffers


class OrderedBatch:
    """The engine's instructions of one rank in one batch (``hosts.runner.Computations``).

    The engine must know the shapes of received tensors.
    """

    def __init__(self, engine: Any, order: PipelineSchedule) -> None:
        self._engine, self._links = engine, Links(dist.group.WORLD)
        self._buffers = _buffers(order.ranks[engine.stage_id])
        self._loading = {0, order.num_stages - 1}  # inputs, labels

    @property
    def num_buffers(self) -> int:
        """The largest number of microbatches that are between forward and input gradient at one time."""
        return max(self._buffers.values()) + 1

    def begin_receive(self, action: Action) -> Message:
        # New buffers: more than one message may be coming, and earlier ones may still be in use.
        engine, like = self._engine, getattr(self._engine, _receive_buffer(action))
        source = engine.grid.stage_to_global(engine.prev_stage if action.kind is Kind.FORWARD else engine.next_stage)
        tensors = [like] if torch.is_tensor(like) else like
        return [self._links.receive(torch.empty_like(tensor), source) for tensor in tensors]

    def end_receive(self, action: Action, message: Message) -> None:
        name, tensors = _receive_buffer(action), [transfer.tensor for transfer in message]
        like, coming = getattr(self._engine, name), iter(message)
        setattr(self._engine, name, tensors[0] if torch.is_tensor(like) else type(like)(tensors))
        with Overrides() as overrides:
            overrides.set(p2p, "recv", lambda tensor, src_stage: next(coming).wait())
            self._receive(action)

    def compute(self, action: Action) -> None:
        if action.kind is Kind.WEIGHT_GRAD:
            self._run(WeightGradients, stage=action.stage, microbatch=action.microbatch)
            return
        place = self._place(action)
        if action.kind is not Kind.FORWARD:
            self._run(_BACKWARD[action.kind], **place)
            return
        if action.stage in self._loading:
            self._run(host.LoadMicroBatch, buffer_id=place["buffer_id"])
        self._run(host.ForwardPass, **place)

    def send(self, action: Action) -> Message:
        message: list[Transfer] = []

        def begin(tensor: torch.Tensor, dest_stage: int) -> None:
            message.append(self._links.send(tensor, self._engine.grid.stage_to_global(dest_stage)))

        with Overrides() as overrides:
            overrides.set(p2p, "send", begin)
            self._send(action)
        return message

    def _receive(self, action: Action) -> None:
        self._run(host.RecvActivation if action.kind is Kind.FORWARD else host.RecvGrad, **self._place(action))

    def _send(self, action: Action) -> None:
        self._run(host.SendActivation if action.kind is Kind.FORWARD else host.SendGrad, **self._place(action))

    def _run(self, instruction: type, **arguments: int) -> None:
        self._engine._INSTRUCTION_MAP[instruction](self._engine, **arguments)

    def _place(self, action: Action) -> dict[str, int]:
        """Return the arguments of an action's instructions."""
        return {"buffer_id": self._buffers[action.microbatch]}


class VBatch(OrderedBatch):
    """The instructions of DualPipeV's engine, with two stages on each rank in a V.

    The engine's own schedule holds more microbatches than 1F1B and computes weight gradients in its backwards. The
    engine exchanges the shapes of activations before it first sends them. This exchange blocks both ranks. It cannot
    deadlock, because all ranks begin their transfers in one sequence (``schedule.messages``). So even the first batch
    runs in our order.
    """

    def __init__(self, engine: Any, order: PipelineSchedule) -> None:
        super().__init__(engine, order)
        self._loading = {0}  # inputs and labels: rank 0 has both ends of the V

    @property
    def num_buffers(self) -> int:
        """One for each microbatch in each phase, as in DualPipeV's own schedule."""
        return 2 * int(self._engine.micro_batches)

    def begin_receive(self, action: Action) -> Message:
        with self._queued(self._links.receive) as message:
            self._receive(action)
        return message

    def end_receive(self, action: Action, message: Message) -> None:
        for transfer in message:
            transfer.wait()

    def send(self, action: Action) -> Message:
        with self._queued(self._links.send) as message:
            self._send(action)
        return message

    @contextmanager
    def _queued(self, begin: Callable[[torch.Tensor, int], Transfer]) -> Iterator[list[Transfer]]:
        """Begin the transfers that the engine queues inside."""
        message: list[Transfer] = []

        def queue(op: Any, tensors: list[torch.Tensor], stage: int) -> None:
            rank = self._engine.grid.stage_to_global(stage)
            message.extend(begin(tensor, rank) for tensor in tensors)

        with Overrides() as overrides:
            overrides.set(self._engine, "_queue_p2p", queue)
            yield message

    def _place(self, action: Action) -> dict[str, int]:
        phase = phase_of(action.stage, self._engine.num_stages)
        return {"buffer_id": phase * self._engine.micro_batches + action.microbatch, "phase": phase}


def _receive_buffer(action: Action) -> str:
    """Return the engine's attribute with the memory into which it receives an action's input."""
    return "pipe_recv_buf" if action.kind is Kind.FORWARD else "grad_layer"


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
