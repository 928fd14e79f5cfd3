"""Check that the ranks run the order that the schedule says."""

from __future__ import annotations

from collections.abc import Sequence

from tf_adapters.collectives import Collectives, decide_from_all
from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


def verify_schedule(collectives: Collectives, schedule: PipelineSchedule, executed: Sequence[Action]) -> None:
    """Raise ScheduleError on all ranks if a rank did not run its row of the schedule in a step.

    A weight gradient may have run earlier than planned, because the host needed it for a reduction.
    """
    expected = [_without_weights(row) for row in schedule.ranks]

    def local() -> int | tuple[Action, ...]:
        """Return the index of the schedule's row that this rank ran, or its actions if they are no such row."""
        actions = tuple(executed)
        row = _without_weights(actions)
        return expected.index(row) if actions and row in expected else actions

    def check(ranks: Sequence[int | tuple[Action, ...]]) -> None:
        if all(isinstance(row, int) for row in ranks):
            return
        by_rank = [schedule.ranks[row] if isinstance(row, int) else row for row in ranks]
        ran = {schedule.rank_of(actions[0].stage): actions for actions in by_rank if actions}
        rows = PipelineSchedule(tuple(ran.get(rank, ()) for rank in range(len(schedule.ranks))))
        raise ScheduleError(
            f"the ranks did not run the schedule. They ran:\n{rows.grid()}\nThe schedule is:\n{schedule.grid()}"
        )

    decide_from_all(collectives, local, check)


def _without_weights(row: Sequence[Action]) -> tuple[tuple[Action, ...], frozenset[Action]]:
    """Split a row into the actions whose order matters to its neighbours, and its weight gradients."""
    weights = frozenset(action for action in row if action.kind is Kind.WEIGHT_GRAD)
    return tuple(action for action in row if action not in weights), weights
