"""A batch in the order of a plan, driven by Megatron's own function of the schedule.

The host's function requests forwards and backwards in its own order. At each request, the plan's row runs up to the
requested action, with the host's own forward and backward steps. The host gets stand-ins for tensors, and its sends and
receives are skipped. Timers, the time at which gradients may be reduced, token counts, losses and the end of the batch
stay the host's. The last backward never runs before the host requests it, since gradients must not be reduced earlier.
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

Run = Callable[[Callable[[], Any], Kind, int], Any]
"""Runs the host's forward or backward of a microbatch, masked and timed, and returns its result."""


class Message(NamedTuple):
    """A transfer in progress. It keeps a sent tensor until it has arrived."""

    work: Any
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return the tensor when it has arrived. On a device only the stream waits, not the caller."""
        self.work.wait()
        return self.tensor


class Links:
    """Sends to and receives from this rank's neighbours in a pipeline's process group. Sends do not block.

    No other transfer uses the group while a batch runs in a plan's order. Both ends begin their transfers in the same
    sequence (``schedule.messages``). They therefore match on gloo, where transfers are independent, and on NCCL, which
    runs the transfers of a pair or of the group one after the other.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._rank = group, group.rank()
        self.is_first, self.is_last = self._rank == 0, self._rank == group.size() - 1

    def send(self, tensor: torch.Tensor, step: int) -> Message:
        """Begin to send to the next rank (``step`` 1) or the previous one (-1)."""
        tensor = tensor.detach().contiguous()  # the host may free the data of its tensor
        return Message(dist.isend(tensor, self._peer(step), group=self._group), tensor)

    def receive(self, tensor: torch.Tensor, step: int) -> Message:
        """Begin to receive into ``tensor`` from the next rank (``step`` 1) or the previous one (-1)."""
        return Message(dist.irecv(tensor.detach(), self._peer(step), group=self._group), tensor)

    def _peer(self, step: int) -> int:
        return dist.get_global_rank(self._group, self._rank + step)


@dataclass
class _InFlight:
    """The tensors of a microbatch between its forward and its backward."""

    inputs: list[Any]
    outputs: list[Any]
    sent: Message | None


class OrderedBatch:
    """One rank's part of one batch.

    Args:
        row: the rank's actions in order. Forwards, and backwards, are in the order of the microbatches.
        receives: the action before which each receive begins, and the messages that have arrived by then.
        compute: runs a WEIGHT_GRAD action; its flag says whether it is the last one.
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
        self._forwards = self._backwards = 0  # number that have run
        self._forward_step: Callable[..., Any] = host.forward_step
        self._arguments: dict[str, Any] = {}  # arguments of the host's first forward
        self._of_backward: dict[str, Any] = {}
        self._shapes: dict[bool, Any] = {}  # shape of an input (False) and of an output's gradient (True)
        self._coming: dict[Action, Message] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._tokens: dict[int, Any] = {}
        self._sent = SentMessages()  # gradients

    @contextmanager
    def without_transfers(self) -> Iterator[None]:
        """Run the host's function inside, and skip its own sends and receives."""

        def communicate(communicator: Any, *, recv_prev: bool, tensor_shape: Any, **_: Any) -> tuple[None, None, None]:
            if recv_prev:
                self._shapes[False] = tensor_shape
            return None, None, None

        with Overrides() as overrides:
            overrides.set(P2PCommunicator, "_communicate", communicate)
            yield

    def forward(self, call: functools.partial[Any], microbatch: int) -> tuple[list[torch.Tensor], Any]:
        """Answer the host's request for a forward with a stand-in for its output and its number of tokens."""
        if not self._arguments:
            self._take_arguments(call)
        while self._forwards <= microbatch:
            self._advance()
        return [torch.empty(1)], self._tokens.pop(microbatch)

    def backward(self, microbatch: int) -> list[None]:
        """Answer the host's request for a backward with a stand-in for the gradient of its input."""
        while self._backwards <= microbatch:
            self._advance()
        return [None]

    def finish(self) -> None:
        """Run the remaining actions, and wait until all sent messages have arrived."""
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
            self._begin_receive(target)
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

    def _begin_receive(self, action: Action) -> None:
        """Begin to receive the input of a forward or a backward."""
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
            of.sent.wait()  # the output has arrived, since its gradient is here
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
    """Return whether transfers through the batch's ``communicator`` (None: the host's default) can be skipped."""
    if communicator is None:
        return True
    ours = type(communicator)._communicate is P2PCommunicator._communicate
    return ours and dist.get_process_group_ranks(communicator.pp_group) == dist.get_process_group_ranks(pp_group)
