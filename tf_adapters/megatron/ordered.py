"""A batch in the order of a plan, driven by Megatron's own function of the schedule.

The host's function asks for forwards and backwards in its own order. Each time the plan's row runs up to what is asked
for, with the host's own forward and backward steps; in the host's tensors' place it gets stand-ins, and what it sends
and receives is left out. Everything else in it stays the host's: timers, when gradients may be reduced, tokens, the
losses, what ends the batch. No forward or backward runs before its row's turn, nor the last backward before the host
has asked for it: until then gradients are not to be reduced.
Source: megatron/core/pipeline_parallel/schedules.py and p2p_communication.py.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules as host
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_type

from tf_adapters.hosts.sent import SentMessages
from tf_adapters.overrides import Overrides
from tf_adapters.schedule.deferral import most_held
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.schedule.messages import Receives

__all__ = ["Links", "OrderedBatch", "is_replaceable"]

Run = Callable[[Callable[[], Any], Kind, int], Any]
"""Runs the host's forward or backward of a microbatch, masked and timed, and returns what that returned."""


class Message(NamedTuple):
    """A transfer under way. What is sent is kept here until it has arrived."""

    work: Any
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there; on a device what follows on its stream waits, not the caller."""
        self.work.wait()
        return self.tensor


class Links:
    """This rank's way to its neighbours in a pipeline's process group. Sends do not wait for their receivers.

    Nothing else is under way on that group while a batch runs in a plan's order. Both ends begin their transfers in one
    sequence (``schedule.messages``), so that they match on gloo, where each stands alone, and on NCCL, which runs those
    of a pair, or of the whole group, one after the other.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._rank = group, group.rank()
        self.is_first, self.is_last = self._rank == 0, self._rank == group.size() - 1

    def send(self, tensor: torch.Tensor, step: int) -> Message:
        """Begin to send to the next rank (``step`` 1) or the one before (-1)."""
        tensor = tensor.detach().contiguous()  # the host may take the data of its own tensor away
        return Message(dist.isend(tensor, self._peer(step), group=self._group), tensor)

    def receive(self, tensor: torch.Tensor, step: int) -> Message:
        """Begin to receive into ``tensor`` from the next rank (``step`` 1) or the one before (-1)."""
        return Message(dist.irecv(tensor.detach(), self._peer(step), group=self._group), tensor)

    def _peer(self, step: int) -> int:
        return dist.get_global_rank(self._group, self._rank + step)


@dataclass
class _InFlight:
    """What a microbatch has between its forward and its backward: as the host's steps take and give it."""

    inputs: list[Any]
    outputs: list[Any]
    sent: Message | None


class OrderedBatch:
    """One rank's part of one batch.

    Args:
        row: what the rank runs, in order; forwards, and backwards, in the order of the microbatches.
        receives: before which action the rank begins to receive which inputs, and what has then arrived elsewhere.
        links: to its neighbours.
        device: where its messages live.
        run: for a forward or backward.
        compute: runs a WEIGHT_GRAD action; told whether it is the last one.
    """

    def __init__(
        self,
        row: tuple[Action, ...],
        receives: Receives,
        links: Links,
        device: torch.device,
        run: Run,
        compute: Callable[[Action, bool], None],
    ) -> None:
        self._row, self._receives, self._links, self._device = deque(row), receives, links, device
        self._run, self._compute = run, compute
        self._last = next((action for action in reversed(row) if action.kind is Kind.WEIGHT_GRAD), None)
        self._window = most_held(row)
        self._forwards = self._backwards = 0  # that have run
        self._forward_step: Callable[..., Any] = host.forward_step
        self._arguments: dict[str, Any] = {}  # of the host's first forward
        self._of_backward: dict[str, Any] = {}
        self._shapes: dict[bool, Any] = {}  # of an input and (True) of an output's gradient
        self._coming: dict[Action, Message] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._tokens: dict[int, Any] = {}
        self._sent = SentMessages()  # gradients

    @contextmanager
    def without_transfers(self) -> Iterator[None]:
        """Around the host's function: what it sends and receives by itself is left out."""

        def communicate(communicator: Any, *, recv_prev: bool, tensor_shape: Any, **_: Any) -> tuple[None, None, None]:
            if recv_prev:
                self._shapes[False] = tensor_shape
            return None, None, None

        with Overrides() as overrides:
            overrides.set(P2PCommunicator, "_communicate", communicate)
            yield

    def forward(self, call: functools.partial[Any], microbatch: int) -> tuple[list[torch.Tensor], Any]:
        """The host asks for a forward by this ``call``: a stand-in for its output, and its number of tokens."""
        if not self._arguments:
            self._take_arguments(call)
        while self._forwards <= microbatch:
            self._advance()
        return [torch.empty(1)], self._tokens.pop(microbatch)

    def backward(self, microbatch: int) -> list[None]:
        """The host asks for a backward: a stand-in for the gradient of its input."""
        while self._backwards <= microbatch:
            self._advance()
        return [None]

    def finish(self) -> None:
        """Run what is left, and wait until everything that was sent has arrived."""
        while self._row:
            self._advance()
        self._sent.finish()

    def _take_arguments(self, call: functools.partial[Any]) -> None:
        self._forward_step = call.func
        self._arguments = inspect.signature(call.func).bind(*call.args, **call.keywords).arguments
        self._of_backward = {"config": self._arguments["config"]}
        if "model_type" in inspect.signature(host.backward_step).parameters:  # before 0.17
            self._of_backward["model_type"] = get_model_type(self._arguments["model"])

    def _advance(self) -> None:
        action = self._row.popleft()
        for target in self._receives.before.get(action, ()):
            self._begin_to_receive(target)
        if action.kind is Kind.WEIGHT_GRAD:
            self._compute(action, action == self._last)
            return
        message = self._coming.pop(action, None)
        received = [None if message is None else message.wait()]
        if action.kind is Kind.FORWARD:
            self._sent.let_go(self._receives.taken.get(action, 0))
            self._run_forward(action, received)
        else:
            self._run_backward(action, received)

    def _begin_to_receive(self, action: Action) -> None:
        forward = action.kind is Kind.FORWARD
        dtype, shape = self._arguments["config"].pipeline_dtype, self._shapes[not forward]
        buffer = torch.empty(shape, dtype=dtype, device=self._device, requires_grad=forward)
        self._coming[action] = self._links.receive(buffer, -1 if forward else 1)

    def _run_forward(self, action: Action, inputs: list[Any]) -> None:
        microbatch, config = action.microbatch, self._arguments["config"]
        changed: dict[str, Any] = {"input_tensor": inputs, "current_microbatch": microbatch}
        if microbatch:
            changed["is_first_microbatch"] = False
        if config.num_microbatches_with_partial_activation_checkpoints is not None:
            place = microbatch % self._window
            changed["checkpoint_activations_microbatch"] = (
                place >= config.num_microbatches_with_partial_activation_checkpoints
            )
        call = functools.partial(self._forward_step, **{**self._arguments, **changed})
        outputs, self._tokens[microbatch] = self._run(call, action.kind, microbatch)
        (output,) = outputs
        self._shapes[True] = output.shape
        sent = None if self._links.is_last else self._links.send(output, 1)
        host.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
        self._in_flight[microbatch] = _InFlight(inputs, outputs, sent)
        self._forwards += 1

    def _run_backward(self, action: Action, grads: list[Any]) -> None:
        of = self._in_flight.pop(action.microbatch)
        if of.sent is not None:
            of.sent.wait()  # it has arrived: its gradient is here
        call = functools.partial(
            host.backward_step,
            input_tensor=of.inputs,
            output_tensor=of.outputs,
            output_tensor_grad=grads,
            **self._of_backward,
        )
        (gradient,) = self._run(call, action.kind, action.microbatch)
        if not self._links.is_first:
            self._sent.keep([self._links.send(gradient, -1)])
        self._backwards += 1


def is_replaceable(communicator: Any, pp_group: Any) -> bool:
    """Whether the host's transfers by a ``communicator`` that a batch was given (None: its own) can be left out."""
    if communicator is None:
        return True
    ours = type(communicator)._communicate is P2PCommunicator._communicate
    return ours and dist.get_process_group_ranks(communicator.pp_group) == dist.get_process_group_ranks(pp_group)
