"""Where a step of ours ends on hosts whose ranks update their weights independently of each other.

A rank knows only its own updates, and it may skip one: its own gradients are not finite, or it has nothing to train.
If ranks then sent messages in their updates, a rank that updates would wait for one that never comes. But all ranks
run the same batches. So ranks count batches and decide together only before a batch:

    batch      1        2        3        4        5
    rank 0       -        U    |   -        U    |        U: an update, -: none
    rank 1       -        -    |   -        U    |        |: the step ends, on both ranks before the same batch

In a *learning* step each rank says before each batch whether it has updated its weights. The step ends as soon as one
rank has, and all ranks then know the number of batches per update. Steps are learning ones until two in a row have the
same number, and again after every ``learning_interval``-th step. The other steps send no message. They end after that
number of batches, whether or not this rank updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from tf_adapters.collectives import Collectives
from tf_adapters.log import announce
from tf_adapters.training.controller import Controller

PATIENCE = 64
"""A learning step has a message after each of its first 64 batches, and from then on after every 64th."""


class StepBoundaries:
    """Counts batches and updates of one rank. Ranks call ``ends``, ``ends_here`` and ``begin_batch`` at equal points.

    Attributes:
        batches: the batches of the open step, equal on all ranks.
        per_update: the batches of a step, equal on all ranks; None while they are being learned.
        updates_seen: whether a rank has updated its weights so far, equal on all ranks.
    """

    def __init__(self, collectives: Collectives, optimizers: int, learning_interval: int) -> None:
        """``optimizers`` is this rank's number of them. Every ``learning_interval``-th step is a learning one."""
        self._collectives, self._optimizers, self._interval = collectives, optimizers, learning_interval
        self.batches = 0
        self.per_update: int | None = None
        self.updates_seen = False
        self._learned: tuple[int, ...] = ()  # the numbers of batches per update in the last two learning steps
        self._since_update = 0  # this rank's batches since it last updated
        self._stepped: set[int] = set()  # optimizers that have stepped since the newest batch
        self._span: int | None = None  # batches of this rank's newest update in the open step

    @property
    def has_updated(self) -> bool:
        """Return whether any optimizer of this rank has stepped since the newest batch."""
        return bool(self._stepped)

    @property
    def skipped(self) -> bool:
        """Return whether this rank has not updated its weights in the open step."""
        return self._span is None

    def begin_batch(self) -> None:
        """A training batch begins."""
        if self._stepped:
            self._since_update = 0
            self._stepped.clear()
        self._since_update += 1
        self.batches += 1

    def stepped(self, optimizer: int) -> bool:
        """Note that an optimizer has stepped; return whether this rank's step has ended with it.

        Then the step also ends on all other ranks before their next batch.
        """
        if not self.batches:
            return False
        self._stepped.add(optimizer)
        self._span = self._since_update
        over = self._tells if self.per_update is None else self.batches >= self.per_update
        return over and len(self._stepped) == self._optimizers

    def ends(self) -> bool:
        """Return whether the open step is over, before the next batch begins. Equal on all ranks."""
        if not self.batches:
            return False
        if self.per_update is not None:
            return self.batches >= self.per_update
        return self._tells and self._learn()

    def ends_here(self) -> bool:
        """Return whether the open step is over, if no batch follows. Equal on all ranks."""
        return self.batches > 0 and self._learn()

    def step_ended(self, step: int) -> None:
        """The open step, number ``step``, has ended on all ranks."""
        self.batches, self._span = 0, None
        if step % self._interval == 0 or len(self._learned) < 2 or len({*self._learned}) > 1:
            self.per_update = None

    @property
    def _tells(self) -> bool:
        """Return whether ranks exchange a message before the next batch of a learning step."""
        return self.batches < PATIENCE or self.batches % PATIENCE == 0

    def _learn(self) -> bool:
        """Ask all ranks for updates in the open step. A rank that skipped an earlier one has a longer span."""
        spans = [span for span in self._collectives.gather(self._span) if span is not None]
        if not spans:
            return False
        self.per_update, self.updates_seen = min(spans), True
        self._learned = (*self._learned[-1:], self.per_update)
        return True


class UpdateSteps:
    """Begins and ends the controller's steps on a host whose ranks update their weights independently.

    Call ``before_batch`` and then ``begin_batch`` at each batch, ``stepped`` after each step of an optimizer and
    ``finish`` at detach.

    Args:
        optimizers: the number of this rank's optimizers.
        together: whether each update needs all ranks, equal on all ranks. If so, each step ends in its update.
    """

    def __init__(
        self, controller: Controller, collectives: Collectives, optimizers: int, together: bool = False
    ) -> None:
        self.boundaries = StepBoundaries(collectives, optimizers, controller.config.replan_interval)
        self._controller, self._rank, self._together = controller, collectives.rank, together
        self._said: set[str] = set()

    def before_batch(self) -> None:
        """End the open step if it is over. Called on all ranks before the same batch."""
        boundaries = self.boundaries
        if not boundaries.batches:
            self._controller.decide()  # what a checkpoint has left to decide
        skipped = boundaries.skipped
        if boundaries.ends():
            if skipped:
                self._say_skipped()
            self._end()
        elif boundaries.batches == PATIENCE and not boundaries.updates_seen:
            self._controller.waits_for_update = True
            self._warn_no_update()

    def begin_batch(self) -> None:
        """A batch begins, after the controller's ``begin_step``."""
        if not self._together:
            self.boundaries.begin_batch()

    def stepped(self, optimizer: int) -> None:
        """An optimizer has stepped: close the step on this rank, if it is over. It sends no message."""
        if self._together:
            self._controller.end_step()
        elif self.boundaries.stepped(optimizer) and self._controller.in_step:
            self._controller.close_step()

    def finish(self) -> None:
        """End the open step if it is over, after the last batch. Called on all ranks."""
        if self.boundaries.ends_here():
            self._end()
        elif self.boundaries.batches and not self.boundaries.updates_seen:
            self._warn_no_update()

    def _end(self) -> None:
        controller = self._controller
        if controller.in_step:
            controller.close_step()
        controller.decide()
        controller.waits_for_update = False
        self.boundaries.step_ended(controller.state.completed_steps)

    def _warn_no_update(self) -> None:
        if "no update" not in self._said:
            self._said.add("no update")
            self._controller.warn(
                f"no update was seen in {self.boundaries.batches} batches, and a step of timely_freeze ends with one: "
                "step() of the given optimizer did not run. Pass the optimizer whose step() runs, such as the one "
                "inside SAM; until then training is the host's own"
            )

    def _say_skipped(self) -> None:
        if "skipped" not in self._said:
            self._said.add("skipped")
            step = self._controller.step
            announce(0, f"rank {self._rank} updated nothing in step {step}; the step ends as on the other ranks")


class HeldSinceUpdate:
    """The parameters that all batches since an optimizer's last step froze. The next step must not move them.

    The batches may belong to several steps with different masks, if this rank skipped an update.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._held: dict[int, set[torch.nn.Parameter]] = {}

    def add_batch(self, held: Iterable[torch.nn.Parameter]) -> None:
        """A batch begins in which every microbatch freezes these parameters."""
        now = set(held)
        for optimizer in self._optimizers:
            self._held[id(optimizer)] = self._held.get(id(optimizer), now) & now

    def take(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """Return the parameters that this optimizer must leave now, without those of other optimizers."""
        held = self._held.pop(id(optimizer), set())
        if not held:
            return []
        others = [other for other in self._optimizers if other is not optimizer]
        theirs = {id(p) for other in others for p in _parameters(other.param_groups)}
        return [parameter for parameter in held if id(parameter) not in theirs]


def _parameters(groups: Sequence[Mapping[str, Iterable[torch.nn.Parameter]]]) -> list[torch.nn.Parameter]:
    return [parameter for group in groups for parameter in group["params"]]
