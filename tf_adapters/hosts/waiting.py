"""Weight gradients that wait while a host runs forwards and backwards in its own order."""

from __future__ import annotations

from collections.abc import Callable

from tf_adapters.schedule.ir import Action, Kind

__all__ = ["WaitingWeights"]


class WaitingWeights:
    """The weight-gradient actions of one rank's row, each due once the action before it has run.

    Args:
        row: what the rank runs in a batch, in order.
        compute: runs a WEIGHT_GRAD action; told whether it is the last one of its stage.
    """

    def __init__(self, row: tuple[Action, ...], compute: Callable[[Action, bool], None]) -> None:
        self._row, self._compute = row, compute
        self._weights = [action for action in row if action.kind is Kind.WEIGHT_GRAD]
        self._last = {action.stage: action for action in self._weights}
        self._passed: set[Action] = set()

    def backward_kind(self, stage: int, microbatch: int) -> Kind:
        """What the host's backward of a microbatch is: BACKWARD, or INPUT_GRAD where its weight gradients wait."""
        split = Action(stage, Kind.WEIGHT_GRAD, microbatch) in self._weights
        return Kind.INPUT_GRAD if split else Kind.BACKWARD

    def passed(self, action: Action) -> None:
        """A forward or backward has run."""
        self._passed.add(action)

    def run(self) -> None:
        """Compute what stands in the row before the next forward or backward."""
        for action in self._row:
            if action.kind is Kind.WEIGHT_GRAD:
                self._run_once(action)
            elif action not in self._passed:
                return

    def finish(self, stage: int | None = None) -> None:
        """Compute everything, of one stage or of all, whose input gradient has run."""
        for action in self._weights:
            if (
                stage in (None, action.stage)
                and Action(action.stage, Kind.INPUT_GRAD, action.microbatch) in self._passed
            ):
                self._run_once(action)

    def _run_once(self, action: Action) -> None:
        if action not in self._passed:
            self._passed.add(action)
            self._compute(action, action == self._last[action.stage])
