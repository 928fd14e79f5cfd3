"""Where a rank of Megatron-Core's interleaved schedule waits until what it sent is received.

Up to its last warm-up forward and after its last steady backward, a rank sends a result, begins to receive the next
action's input, and waits for both. Between them is the steady phase. With ``overlap_p2p_comm`` a rank waits there for a
send only once the next action of that kind has run, and begins to receive an input right after the action of that kind
before. Without, it runs a forward and a backward, then exchanges all four tensors and waits for them. A send is over
only once its receiver has begun to receive (gloo and NCCL, but for messages so small that they are buffered).

Source: megatron/core/pipeline_parallel/schedules.py (``forward_backward_pipelining_with_interleaving``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.ir import Action, PipelineSchedule, SendWait


@dataclass(frozen=True)
class Row:
    """What one pipeline rank runs, and when it sends and receives. Everything below is by position in ``actions``.

    The first ``warmup`` actions come before the steady phase. ``overlaps`` is the host's ``overlap_p2p_comm``.
    """

    actions: tuple[Action, ...]
    warmup: int
    overlaps: bool

    @property
    def _steady(self) -> range:
        """Forwards and backwards in turn."""
        return range(self.warmup, len(self.actions) - self.warmup)

    def _together(self, position: int) -> tuple[int, int]:
        """First and last of what runs between two exchanges: a steady forward and its backward, else one action."""
        if self.overlaps or position not in self._steady:
            return position, position
        first = position - (position - self.warmup) % 2
        return first, first + 1

    def receives_after(self, position: int) -> int:
        """What ends right before the receive of an action's input begins; below 0: nothing."""
        if self.overlaps and position in self._steady:
            return max(position - 2, self.warmup - 1)
        return self.needs_at(position) - 1

    def needs_at(self, position: int) -> int:
        """What does not begin before an action's input has come."""
        return self._together(position)[0]

    def sends_after(self, position: int) -> int:
        """What ends right before an action's result is sent."""
        return self._together(position)[1]

    def holds_up(self, position: int) -> int | None:
        """What does not begin before an action's result is received; None where nothing of the batch waits for that."""
        held = self.sends_after(position) + 1
        if self.overlaps and position in self._steady:
            held = position + 3 if position + 2 in self._steady else len(self.actions)
        return held if held < len(self.actions) else None


def send_waits(rows: Sequence[Row]) -> tuple[SendWait, ...]:
    """Of all ranks. Empty if ranks would then wait for one another for ever: the host is not as it is read here."""
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
