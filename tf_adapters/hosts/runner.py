"""Run one rank's row of an order, with any number of stages on the rank.

A row is the sequence of a rank's actions: F (forward), B (backward), I (input gradient) and W (weight gradient). The
runner decides when actions run and when transfers begin and end, and it keeps what was sent until it has arrived. The
host's adapter computes and chooses the tensors (``Computations``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Protocol

from tf_adapters.hosts.links import Message, SentMessages
from tf_adapters.schedule.deferral import backward_of
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.schedule.messages import Receives


class Computations(Protocol):
    """What a host does for its rank's actions. It passes tensors between two stages of one rank itself."""

    def begin_receive(self, action: Action) -> Message:
        """Begin to receive the input of an action into new memory."""

    def end_receive(self, action: Action, message: Message) -> None:
        """Wait for the input of an action, which is the next one to run."""

    def compute(self, action: Action) -> None:
        """Run an action. Its input has arrived."""

    def send(self, action: Action) -> Message:
        """Begin to send the result of the action that has just run."""


class RowRunner:
    """Runs the row of a ``rank`` for one batch, at once or step by step as the host requests.

    Args:
        order: the order of all ranks.
        receives: the action before which each receive begins, and the messages that have arrived by then.
    """

    def __init__(self, order: PipelineSchedule, receives: Receives, rank: int, host: Computations) -> None:
        self._left = deque(order.ranks[rank])
        self._order, self._receives, self._host = order, receives, host
        self._done: set[Action] = set()
        self._coming: dict[Action, Message] = {}
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
        action, order = self._left.popleft(), self._order
        for target in self._receives.before.get(action, ()):
            self._coming[target] = self._host.begin_receive(target)
        if action in self._coming:
            self._host.end_receive(action, self._coming.pop(action))
            sender = order.home[order.source[action].stage]
            self._sent[sender].let_go(self._receives.taken.get(action, 0))
        self._host.compute(action)
        receiver = order.target.get(action)
        if receiver is not None and receiver in order.received:
            self._sent[order.home[receiver.stage]].keep(self._host.send(action))
        self._done.add(backward_of(action))
