"""Find the actions that wait for a send, in Megatron-Core's interleaved schedule.

The schedule has a warm-up, a steady phase and a cool-down. In warm-up and cool-down, a rank sends a result, begins to
receive the next action's input, and waits for both. In the steady phase with ``overlap_p2p_comm``, a rank waits for a
send after the next action of the same kind, and begins to receive an input after the previous action of that kind.
Without it, a rank runs a forward and a backward, then exchanges all four tensors and waits for them. A send ends when
its receiver has begun to receive. (Gloo and NCCL buffer very small messages.)

Source: megatron/core/pipeline_parallel/schedules.py (``forward_backward_pipelining_with_interleaving``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.ir import Action, PipelineSchedule, SendWait


@dataclass(frozen=True)
class Row:
    """The actions of one pipeline rank, and when it sends and receives. Methods use positions in ``actions``.

    The first ``warmup`` actions come before the steady phase. ``overlaps`` is the host's ``overlap_p2p_comm``.
    """

    actions: tuple[Action, ...]
    warmup: int
    overlaps: bool

    @property
    def _steady(self) -> range:
        """Positions of the steady phase, in which forwards and backwards alternate."""
        return range(self.warmup, len(self.actions) - self.warmup)

    def _together(self, position: int) -> tuple[int, int]:
        """Return the first and last action between two exchanges: a steady forward and its backward, or one action."""
        if self.overlaps or position not in self._steady:
            return position, position
        first = position - (position - self.warmup) % 2
        return first, first + 1

    def receives_after(self, position: int) -> int:
        """Return the action after which the receive of an action's input begins; negative if before the first one."""
        if self.overlaps and position in self._steady:
            return max(position - 2, self.warmup - 1)
        return self.needs_at(position) - 1

    def needs_at(self, position: int) -> int:
        """Return the first action that waits for the input of the action at ``position``."""
        return self._together(position)[0]

    def sends_after(self, position: int) -> int:
        """Return the action after which the result of the action at ``position`` is sent."""
        return self._together(position)[1]

    def holds_up(self, position: int) -> int | None:
        """Return the first action that the send of an action's result blocks; None if it blocks none of the batch."""
        held = self.sends_after(position) + 1
        if self.overlaps and position in self._steady:
            held = position + 3 if position + 2 in self._steady else len(self.actions)
        return held if held < len(self.actions) else None


def send_waits(rows: Sequence[Row]) -> tuple[SendWait, ...]:
    """Return the waits of all ranks. Empty if they form a circle: the host then differs from this model."""
    schedule = PipelineSchedule(tuple(row.actions for row in rows))
    at = {action: (row, position) for row in rows for position, action in enumerate(row.actions)}
    waits = []
    for source, target in schedule.transfers():
        (sender, sent), (receiver, received) = at[source], at[target]
        posted, held = receiver.receives_after(received), sender.holds_up(sent)
        if sender is not receiver and posted >= 0 and held is not None:
            waits.append(SendWait(receiver.actions[posted], sender.actions[held], (source, target)))
        ends, begins = sender.actions[sender.sends_after(sent)], receiver.actions[receiver.needs_at(received)]
        if (ends, begins) != (source, target):
            waits.append(SendWait(ends, begins, (source, target)))
    try:
        schedule.execution_order((wait.posted, wait.blocked) for wait in waits)
    except ScheduleError:
        return ()
    return tuple(waits)
