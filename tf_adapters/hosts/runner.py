"""Run one rank's row of an order, with any number of stages on the rank.

A row is the sequence of a rank's actions: F (forward), B (backward), I (input gradient) and W (weight gradient). The
runner handles the order, the transfers, and the tensors that pass between two stages of one rank. The host's adapter
computes (``Computations``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Protocol

import torch

from tf_adapters.hosts.links import Links, Message
from tf_adapters.hosts.sent import SentMessages
from tf_adapters.schedule.deferral import backward_of
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.messages import Receives


class Computations(Protocol):
    """What a host computes for its rank's actions."""

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        """Run a forward on the input that the stage before has sent (None on the first stage). Return its output."""

    def backward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run a B or an I on the gradient of the forward's output (None on the last stage).

        Return the gradient of the forward's input; None on the first stage.
        """

    def weight_gradients(self, action: Action) -> None:
        """Compute the deferred weight gradients of a W."""

    def buffer(self, action: Action) -> torch.Tensor:
        """Return new memory into which the input of an action is received."""

    def sent(self, action: Action, output: torch.Tensor) -> None:
        """Free the data of a forward's output if the host does so: it has been sent, or passed to the next stage."""


class RowRunner:
    """Runs the row of ``links.rank`` for one batch, step by step as the host requests.

    A forward's input is a leaf of its graph. ``Computations.buffer`` returns such a leaf for a received input, and the
    runner detaches an input that comes from a stage of the same rank.

    Args:
        order: the order of all ranks.
        receives: the action before which each receive begins, and the messages that have arrived by then.
    """

    def __init__(self, order: PipelineSchedule, receives: Receives, links: Links, host: Computations) -> None:
        self._left = deque(order.ranks[links.rank])
        self._home, self._source, self._target = order.home, order.source, order.target
        self._receives, self._links, self._host = receives, links, host
        self._done: set[Action] = set()
        self._coming: dict[Action, Message] = {}
        self._handed_over: dict[Action, torch.Tensor] = {}  # by the action that takes it
        self._sent: defaultdict[int, SentMessages] = defaultdict(SentMessages)  # by the rank they go to

    def run_until(self, action: Action) -> None:
        """Run the row until an F or a B has run. A B counts as run when its I has run."""
        while action not in self._done:
            self._advance()

    def finish_stage(self, stage: int) -> None:
        """Run the row until nothing of a stage is left."""
        while any(action.stage == stage for action in self._left):
            self._advance()

    def finish(self) -> None:
        """Run the rest of the row, and wait until all sent messages have arrived."""
        while self._left:
            self._advance()
        for sent in self._sent.values():
            sent.finish()

    def _advance(self) -> None:
        action = self._left.popleft()
        for target in self._receives.before.get(action, ()):
            self._coming[target] = self._links.receive(
                self._host.buffer(target), self._home[self._source[target].stage]
            )
        if action.kind is Kind.WEIGHT_GRAD:
            self._host.weight_gradients(action)
            return
        received = self._input_of(action)
        if action.kind is Kind.FORWARD:
            output = self._host.forward(action, received)
            self._pass_on(action, output)
            if action in self._target:
                self._host.sent(action, output)
        else:
            self._pass_on(action, self._host.backward(action, received))
        self._done.add(backward_of(action))

    def _input_of(self, action: Action) -> torch.Tensor | None:
        if action in self._handed_over:
            return self._handed_over.pop(action)
        message = self._coming.pop(action, None)
        if message is None:
            return None
        received = message.wait()
        sender = self._home[self._source[action].stage]
        self._sent[sender].let_go(self._receives.taken.get(action, 0))
        return received

    def _pass_on(self, action: Action, result: torch.Tensor | None) -> None:
        """Send an action's result to the rank that needs it, or keep it if that is this rank."""
        target = self._target.get(action)
        if target is None:
            return
        assert result is not None
        rank = self._home[target.stage]
        if rank != self._links.rank:
            self._sent[rank].keep([self._links.send(result, rank)])
        elif action.kind is Kind.FORWARD:
            self._handed_over[target] = result.detach().requires_grad_()
        else:
            self._handed_over[target] = result
