"""Run deferred weight gradients between the forwards and backwards of a host that keeps its own order."""

from __future__ import annotations

from collections.abc import Callable

from tf_adapters.schedule.ir import Action, Kind


class WaitingWeights:
    """The weight-gradient actions of one rank's row. Each is due when the action before it has run.

    Args:
        row: the rank's actions in a batch, in order.
        compute: runs a WEIGHT_GRAD action; its flag says whether the action is the last one of its stage.
    """

    def __init__(self, row: tuple[Action, ...], compute: Callable[[Action, bool], None]) -> None:
        self._row, self._compute = row, compute
        self._weights = [action for action in row if action.kind is Kind.WEIGHT_GRAD]
        self._last = {action.stage: action for action in self._weights}
        self._passed: set[Action] = set()

    def backward_kind(self, stage: int, microbatch: int) -> Kind:
        """Return the kind of a microbatch's backward: INPUT_GRAD if its weight gradients wait, else BACKWARD."""
        split = Action(stage, Kind.WEIGHT_GRAD, microbatch) in self._weights
        return Kind.INPUT_GRAD if split else Kind.BACKWARD

    def passed(self, action: Action) -> None:
        """Note that a forward or backward has run."""
        self._passed.add(action)

    def run(self) -> None:
        """Compute the weight gradients that are due before the next forward or backward of the row."""
        for action in self._row:
            if action.kind is Kind.WEIGHT_GRAD:
                self._run_once(action)
            elif action not in self._passed:
                return

    def finish(self, stage: int | None = None) -> None:
        """Compute all weight gradients whose input gradient has run, of one stage or of all."""
        for action in self._weights:
            is_due = Action(action.stage, Kind.INPUT_GRAD, action.microbatch) in self._passed
            if is_due and stage in (None, action.stage):
                self._run_once(action)

    def _run_once(self, action: Action) -> None:
        if action not in self._passed:
            self._passed.add(action)
            self._compute(action, action == self._last[action.stage])
