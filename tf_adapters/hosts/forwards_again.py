"""The first forwards of a batch, which run again if the update before them was made again (``hosts.post_validation``).

A rank's first forwards are those before anything of a backward begins. They run with weights that may still change. A
second run must find all that the first one found: the data, the random numbers, and the modules' buffers.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tf_adapters.hosts.post_validation import PostValidation
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


def forwards_in_prefix(
    order: PipelineSchedule, before: Mapping[Action, Sequence[Action]], rank: int
) -> tuple[list[Action], int]:
    """Return a rank's forwards before anything of a backward begins, and how many receives have begun by then.

    ``before`` maps each action to the actions whose inputs the rank begins to receive just before it.
    """
    forwards: list[Action] = []
    received = 0
    for action in order.ranks[rank] if 0 <= rank < len(order.ranks) else ():
        begun = before.get(action, ())
        if begins_backward(action, begun):
            break
        received += len(begun)
        forwards.append(action)
    return forwards, received


def begins_backward(action: Action, begun: Sequence[Action]) -> bool:
    """Return whether an action belongs to a backward, or the rank begins to receive a gradient before it."""
    return action.kind is not Kind.FORWARD or any(target.kind is not Kind.FORWARD for target in begun)


class RandomState:
    """The random numbers that come next: torch's on the CPU and on ``device``, Python's, and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._of_device is not None:
            torch.get_device_module(self._device).set_rng_state(self._of_device, self._device)


class BeforeForwards:
    """The state that forwards change besides activations: random numbers, and the buffers of these modules."""

    def __init__(self, modules: Iterable[torch.nn.Module], device: torch.device) -> None:
        self._random = RandomState(device)
        self._buffers = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]

    @torch.no_grad()
    def put_back(self) -> None:
        self._random.put_back()
        for buffer, value in self._buffers:
            buffer.copy_(value)


class ForwardsAgain:
    """The state that a rank needs to run the first forwards of a batch again.

    ``modules`` are this rank's stage or model chunks. ``tracker`` is the host's tracker of random numbers, with
    ``get_states`` and ``set_states``. ``order``, ``before`` and ``rank`` are those of ``forwards_in_prefix``.

    Attributes:
        forwards: the forwards before anything of a backward begins.
        unreceived: number of activations that the previous rank has sent and for which this rank has not begun a
            receive. They must be received and dropped. It is not negative, since a receive begins after its send
            (``schedule.messages``).
    """

    def __init__(
        self,
        validation: PostValidation,
        begin_again: Callable[[], None],
        modules: Sequence[torch.nn.Module],
        device: torch.device,
        tracker: Any,
        order: PipelineSchedule,
        before: Mapping[Action, Sequence[Action]],
        rank: int,
    ) -> None:
        self.validation, self.device = validation, device
        self._begin_again, self._modules, self._tracker = begin_again, modules, tracker
        sent, _ = forwards_in_prefix(order, before, rank - 1)
        self.forwards, received = forwards_in_prefix(order, before, rank)
        self.unreceived = len(sent) - received

    def remember(self) -> None:
        """Keep the state. Call it before the first forward of the batch."""
        self._before = BeforeForwards(self._modules, self.device)
        self._tracked = self._tracker.get_states()

    def put_back(self) -> None:
        self._before.put_back()
        self._tracker.set_states(self._tracked)
        self._begin_again()


class Rewindable:
    """A data iterator that can give its items again.

    When it gives an item again, it restores the random state that followed the item the first time.
    """

    def __init__(self, iterator: Any, device: torch.device) -> None:
        self._iterator, self._device = iterator, device
        self._given: list[tuple[Any, RandomState]] | None = []
        self._again = deque[tuple[Any, RandomState]]()

    def __iter__(self) -> Rewindable:
        return self

    def __next__(self) -> Any:
        if self._again:
            item, after = self._again.popleft()
            after.put_back()
        else:
            item = next(self._iterator)
            if self._given is None:
                return item
            after = RandomState(self._device)
        if self._given is not None:
            self._given.append((copy.copy(item), after))
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def rewind(self) -> None:
        """Give all items again."""
        assert self._given is not None
        self._again.extendleft(reversed(self._given))
        self._given = []

    def go_on(self) -> None:
        """Stop keeping items: they can no longer be given again."""
        self._given = None
