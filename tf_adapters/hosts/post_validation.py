"""Updates before the norm of all gradients is known, which are made again if clipping was due.

Clipping by the global norm makes all ranks of a pipeline meet after each batch. Here a rank updates at once, without
clipping, and keeps copies. The norm arrives while the next batch's first forwards run. Before its first backward each
rank looks at it. If clipping was due, the rank makes the update again with clipped gradients, and its forwards of this
batch run again. No rank has computed a gradient before it has looked, so the trained weights are those of an update
after the norm. Idea: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tf_adapters.hosts.late import LateNorms, LateSums, LateTensor
from tf_adapters.hosts.update_copies import UpdateCopies
from tf_adapters.training.controller import Controller

_LOOKED_AT = 20
_MOST_MADE_AGAIN = 0.2
"""Largest share of the last ``_LOOKED_AT`` updates that were made again; above it updates wait for the norm."""

_PAUSE = 50  # number of updates that then wait


class PostValidation(ABC):
    """Checks the newest update of this rank once the norm is known.

    All ranks of ``group`` create this object at the same point. Every rank finds the same norm, so all of them decide
    alike. The controller gets a note for the report after each update, and a warning when a pause begins.
    """

    def __init__(self, group: Any, device: torch.device, controller: Controller) -> None:
        self._norms, self._controller = LateNorms(group, device), controller
        self._square: LateTensor | LateSums | None = None
        self._copies: dict[tuple[int, ...], tuple[UpdateCopies, Callable[[], Any]]] = {}  # by parameter groups
        self._outcomes = deque[bool](maxlen=_LOOKED_AT)
        self._paused = 0
        self.updates = self.made_again = 0
        self.making_again = False

    @abstractmethod
    def is_due(self, square: torch.Tensor) -> bool:
        """Return whether the host would have changed gradients or skipped the update.

        ``square`` is the square of the norm, or the sums from which the host computes the norm. It may be infinite or
        not a number.
        """

    @abstractmethod
    def clip_again(self, parameters: list[torch.nn.Parameter], square: torch.Tensor) -> None:
        """Clip the gradients of these parameters as the host does."""

    def is_skipped(self, square: torch.Tensor) -> bool:
        """Return whether the host would not have updated at all."""
        return False

    def after_skip(self) -> None:  # noqa: B027
        """Let the host know that the update was taken back and not made again."""

    @property
    def pending(self) -> bool:
        """Return whether the newest update may still have to be made again."""
        return self._square is not None

    def expect(self, own_norm: torch.Tensor) -> LateTensor:
        """Announce an update that does not wait for the norm. Return the norm as a tensor that waits for its value."""
        self._square, norm = self._norms.square_and_norm(own_norm)
        return norm

    def speculates(self, allowed: bool) -> bool:
        """Return whether the next update may be made before the norm is known. Call it once before each update.

        ``allowed`` says whether the batch could run again. During a pause, updates wait for the norm.
        """
        if allowed and not self._paused:
            return True
        self._paused = max(0, self._paused - 1)
        return False

    def before_update(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any] | None = None) -> None:
        """Keep copies if the next update may have to be made again, with ``step`` or by default ``optimizer.step``."""
        if self.pending and not self.making_again:
            groups = tuple(map(id, optimizer.param_groups))
            copies = UpdateCopies(optimizer)
            self._copies[groups] = copies, step or optimizer.step
            self._controller.memory.copied_bytes += copies.num_bytes

    def settle(self) -> bool:
        """Wait for the norm, and make the update again if clipping was due. Return whether it was made again."""
        square, self._square = self._square, None
        if square is None:
            return False
        copies, self._copies = self._copies, {}
        self._controller.memory.copied_bytes = 0
        total = square.arrive()
        due = self.is_due(total)
        self._count(due)
        if due:
            self.making_again = True
            try:
                skipped = self.is_skipped(total)
                for of_optimizer, step in copies.values():
                    if skipped:
                        of_optimizer.take_back()
                    else:
                        of_optimizer.make_again(lambda parameters: self.clip_again(parameters, total), step)
                if skipped:
                    self.after_skip()
            finally:
                self.making_again = False
        return due

    def close(self) -> None:
        """Settle, and free the group. Called on all ranks at the same point."""
        self.settle()
        self._norms.close()

    def _count(self, made_again: bool) -> None:
        self.updates += 1
        self.made_again += made_again
        self._outcomes.append(made_again)
        self._controller.state.renew_note(
            f"optimizer_step post_validated: {self.updates} updates were made before the norm of all gradients was "
            f"known; {self.made_again} of them were made again, since clipping was due"
        )
        if len(self._outcomes) == _LOOKED_AT and sum(self._outcomes) > _MOST_MADE_AGAIN * _LOOKED_AT:
            self._outcomes.clear()
            self._paused = _PAUSE
            self._controller.warn(
                f"optimizer_step post_validated pauses: more than {_MOST_MADE_AGAIN:.0%} of the last {_LOOKED_AT} "
                f"updates were made again, since gradients were clipped; the next {_PAUSE} updates wait for the norm"
            )


class Settles:
    """A hook that makes the last update final before a state is saved or loaded, or a forward runs.

    A copy of the hooked object, pickled or not, has a hook that does nothing.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle

    def __call__(self, *_: Any) -> None:
        self._settle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Settles, (_do_nothing,)


def _do_nothing() -> None:
    """Stand for ``settle`` in a copy."""
