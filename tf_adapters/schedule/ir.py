"""Pipeline schedules as pure data: actions, their text form, and the check that a schedule can run.

The text of an action is that of torch.distributed.pipelining, ``{stage}{kind}{microbatch}``: ``2F0`` is stage 2's
forward of microbatch 0. Indices start at 0.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain, count, pairwise, product
from operator import attrgetter
from typing import Any, NamedTuple

from tf_adapters.errors import ScheduleError


class Kind(str, Enum):
    """The kind of work of an action. The value is its letter in an action's text."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"

    @property
    def freezable(self) -> bool:
        """Return whether it computes weight gradients, which freezing can skip."""
        return self in (Kind.BACKWARD, Kind.WEIGHT_GRAD)


_ACTION = re.compile(r"(0|[1-9][0-9]*)([FBIW])(0|[1-9][0-9]*)")


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One block of work: a stage's forward, backward or half a backward of one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action's text, such as ``2F0``; the inverse of ``str``. Raises ScheduleError."""
        match = _ACTION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError(f"{text!r} is not an action: expected stage, one of F B I W, microbatch, such as '2F0'")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @property
    def freezable(self) -> bool:
        return self.kind.freezable


class SendWait(NamedTuple):
    """``blocked`` cannot start before ``posted`` of another rank ends, although it uses no result of ``posted``.

    Usually ``blocked`` follows a send whose receiver begins to receive when ``posted`` ends. ``sent`` has the action
    whose result is sent and the action that receives it.
    """

    posted: Action
    blocked: Action
    sent: tuple[Action, Action]


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each pipeline rank in one batch, in order.

    A stage lives on one rank; a rank may hold several stages (interleaved and V-shaped schedules) or none.
    ``send_waits`` are the actions of the host that wait for receivers. They are not part of the order.
    """

    ranks: tuple[tuple[Action, ...], ...]
    send_waits: tuple[SendWait, ...] = field(default=(), compare=False)

    @classmethod
    def from_text(cls, ranks: Sequence[Sequence[str]]) -> PipelineSchedule:
        """Read one list of action texts per rank. Raises ScheduleError for a text that is not an action."""
        return cls(tuple(tuple(Action.parse(text) for text in rank) for rank in ranks))

    def to_text(self) -> list[list[str]]:
        """One list of action texts per rank; the inverse of ``from_text``."""
        return [[str(action) for action in rank] for rank in self.ranks]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without derived values."""
        return type(self), (self.ranks, self.send_waits)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Every action, rank after rank."""
        return tuple(action for rank in self.ranks for action in rank)

    @cached_property
    def before(self) -> Mapping[Action, Action]:
        """The previous action of the same rank, by action; a rank's first action is absent."""
        return {action: previous for rank in self.ranks for previous, action in pairwise(rank)}

    @cached_property
    def source(self) -> Mapping[Action, Action]:
        """The action of another stage whose result an action needs, by that action.

        Activations go from F(s, m) to F(s+1, m); input gradients from B or I(s+1, m) to B or I(s, m).
        """
        present = set(self.actions)
        found = ((action, _upstream(action, present)) for action in self.actions)
        return {action: source for action, source in found if source is not None}

    @cached_property
    def target(self) -> Mapping[Action, Action]:
        """The inverse of ``source``: the action of another stage that needs an action's result."""
        return {source: action for action, source in self.source.items()}

    @cached_property
    def received(self) -> Mapping[Action, Action]:
        """The part of ``source`` that comes from another rank: the actions with an input to receive."""
        home = self.home
        return {action: source for action, source in self.source.items() if home[action.stage] != home[source.stage]}

    @cached_property
    def home(self) -> Mapping[int, int]:
        """The rank of each stage."""
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}

    @cached_property
    def num_stages(self) -> int:
        """One more than the highest stage; 0 without actions."""
        return max((action.stage for action in self.actions), default=-1) + 1

    @cached_property
    def num_microbatches(self) -> int:
        """One more than the highest microbatch; 0 without actions."""
        return max((action.microbatch for action in self.actions), default=-1) + 1

    @cached_property
    def splits_backwards(self) -> bool:
        """Whether weight gradients have actions of their own."""
        return any(action.kind is Kind.WEIGHT_GRAD for action in self.actions)

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``. Raises ScheduleError when none does."""
        if stage not in self.home:
            raise ScheduleError(f"stage {stage} is on no rank: the stages are 0 to {self.num_stages - 1}")
        return self.home[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, ascending."""
        return tuple(sorted({action.stage for action in self.ranks[rank]}))

    def transfers(self) -> Iterator[tuple[Action, Action]]:
        """Every pair (source, target) in which the target needs the result of the source on another stage."""
        return ((source, target) for target, source in self.source.items())

    def execution_order(self, also: Iterable[tuple[Action, Action]] = ()) -> tuple[Action, ...]:
        """Return all actions in a topological order.

        In each pair of ``also``, the second action waits for the first. Raises ScheduleError for a deadlock.
        """
        further = tuple(also)
        return self.sorted_by(None, further) if further else self._own_order

    @cached_property
    def _own_order(self) -> tuple[Action, ...]:
        return self.sorted_by(None)

    def sorted_by(
        self, key: Callable[[Action], Any] | None, also: Sequence[tuple[Action, Action]] = ()
    ) -> tuple[Action, ...]:
        """Return the ``execution_order`` that runs, of the actions that are ready, the one with the least ``key``.

        Without a ``key`` it is the action that has been ready longest (Kahn's algorithm).
        """
        turns = count()
        key = key or (lambda _: next(turns))
        waiting = dict.fromkeys(self.actions, 0)
        released: dict[Action, list[Action]] = {action: [] for action in waiting}
        for source, target in chain(*map(pairwise, self.ranks), self.transfers(), also):
            waiting[target] += 1
            released[source].append(target)
        ready = [(key(action), action) for action, sources in waiting.items() if sources == 0]
        heapq.heapify(ready)
        order: list[Action] = []
        while ready:
            _, action = heapq.heappop(ready)
            order.append(action)
            for target in released[action]:
                waiting[target] -= 1
                if waiting[target] == 0:
                    heapq.heappush(ready, (key(target), target))
        if len(order) < len(waiting):
            raise self._deadlock(set(order), also)
        return tuple(order)

    def validate(self) -> PipelineSchedule:
        """Return this schedule if it can run; otherwise raise ScheduleError with the marked grid."""
        assert self._can_run  # raises, or is true; a schedule is checked once
        return self

    @cached_property
    def _can_run(self) -> bool:
        if not self.actions:
            raise ScheduleError("the schedule has no actions")
        self._check_unique()
        self._check_one_rank_per_stage()
        self._check_complete()
        self._check_local_order()
        self.execution_order()
        return True

    def grid(self, marked: Iterable[Action] = ()) -> str:
        """Draw one row per rank and one column per slot, ``marked`` actions as ``>1B0<``."""
        bad = set(marked)
        rows = [[f">{action}<" if action in bad else f" {action} " for action in rank] for rank in self.ranks]
        width = max((len(cell) for row in rows for cell in row), default=0)
        label = len(f"rank {len(rows) - 1}")
        return "\n".join(
            f"{f'rank {rank}':<{label}} |{''.join(cell.center(width) for cell in row)}".rstrip()
            for rank, row in enumerate(rows)
        )

    def _error(self, message: str, *marked: Action) -> ScheduleError:
        return ScheduleError(message, grid=self.grid(marked))

    def _check_unique(self) -> None:
        seen: set[Action] = set()
        for action in self.actions:
            if action in seen:
                raise self._error(f"{action} is listed twice: an action runs once in a batch", action)
            seen.add(action)

    def _check_one_rank_per_stage(self) -> None:
        home: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                first = home.setdefault(action.stage, rank)
                if first != rank:
                    both = f"{action} is on rank {rank} but stage {action.stage} is on rank {first}"
                    raise self._error(f"{both}: a stage lives on one rank", action)

    def _check_complete(self) -> None:
        for name in ("stage", "microbatch"):
            index = attrgetter(name)
            for expected, found in enumerate(sorted(set(map(index, self.actions)))):
                if found != expected:
                    highest = max(self.actions, key=index)
                    raise self._error(f"{name} {expected} is missing although {highest} is there", highest)
        present = set(self.actions)
        for stage, microbatch in product(range(self.num_stages), range(self.num_microbatches)):
            self._check_cell(stage, microbatch, present)

    def _check_cell(self, stage: int, microbatch: int, present: set[Action]) -> None:
        forward, backward, input_grad, weight_grad = every = [Action(stage, kind, microbatch) for kind in Kind]
        have = [action for action in every if action in present]
        if not have:
            raise self._error(f"{forward} is missing: stage {stage} never runs microbatch {microbatch}")
        halves = [action for action in have if action in (input_grad, weight_grad)]
        if backward in have and halves:
            both = f"{backward} and {halves[0]} are both there"
            raise self._error(f"{both}: a backward is either whole (B) or split (I and W)", backward, halves[0])
        if forward not in have:
            raise self._error(f"{have[0]} has no forward: {forward} is missing", have[0])
        if have == [forward]:
            missing = f"{backward}, or {input_grad} and {weight_grad}, is missing"
            raise self._error(f"{forward} has no backward: {missing}", forward)
        if len(halves) == 1:
            other = weight_grad if halves[0] == input_grad else input_grad
            raise self._error(f"{halves[0]} has no other half: {other} is missing", halves[0])

    def _check_local_order(self) -> None:
        place = {action: number for number, action in enumerate(self.actions)}
        for action, number in place.items():
            needed = _local_need(action)
            if needed is not None and place.get(needed, -1) > number:
                before = f"{action} comes before {needed} on rank {self.home[action.stage]}"
                raise self._error(f"{before}, which it needs: they deadlock", action, needed)

    def _deadlock(self, done: set[Action], also: Sequence[tuple[Action, Action]]) -> ScheduleError:
        needed = {target: source for source, target in chain(also, self.transfers()) if source not in done}
        left = ([action for action in rank if action not in done] for rank in self.ranks)
        stuck = [rank[0] for rank in left if rank]
        waits = ", ".join(f"{action} waits for {needed[action]}" for action in stuck)
        return self._error(f"the schedule deadlocks: {waits}", *stuck)


def _upstream(action: Action, present: set[Action]) -> Action | None:
    """Return the action of a neighbouring stage whose result ``action`` needs, or None."""
    if action.kind is Kind.FORWARD:
        candidates = [Action(action.stage - 1, Kind.FORWARD, action.microbatch)]
    elif action.kind is Kind.WEIGHT_GRAD:
        return None
    else:
        candidates = [Action(action.stage + 1, kind, action.microbatch) for kind in (Kind.BACKWARD, Kind.INPUT_GRAD)]
    return next((candidate for candidate in candidates if candidate in present), None)


def _local_need(action: Action) -> Action | None:
    """Return the action of the same stage that must run before ``action``, or None."""
    if action.kind is Kind.FORWARD:
        return None
    before = Kind.INPUT_GRAD if action.kind is Kind.WEIGHT_GRAD else Kind.FORWARD
    return Action(action.stage, before, action.microbatch)
