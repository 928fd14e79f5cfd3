"""Orders of actions for named pipeline schedules, generated without a host.

F is a forward, B a full backward. The number after it is the microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest

from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.deferral import backward_of, first_half, second_half
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


def gpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards. Source: Huang et al., GPipe, 2019. Two stages, three microbatches::

    rank 0 | F0 F1 F2 .  .  B0 B1 B2
    rank 1 | .  F0 F1 F2 B0 B1 B2
    """
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return PipelineSchedule(
        tuple(tuple(Action(rank, kind, m) for kind in kinds for m in range(microbatches)) for rank in range(ranks))
    ).validate()


def one_forward_one_backward(ranks: int, microbatches: int) -> PipelineSchedule:
    """Rank r of R runs R - r forwards, then a backward and a forward in turn. Source: Narayanan et al., 2019.

    Three stages, four microbatches::

        rank 0 | F0 F1 F2 .  .  B0 F3 .  B1 .  B2 .  B3
        rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    orders = []
    for rank in range(ranks):
        forwards, backwards = (
            [Action(rank, kind, m) for m in range(microbatches)] for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        orders.append(tuple(_in_turn(forwards, backwards, ahead=ranks - 1 - rank)))
    return PipelineSchedule(tuple(orders)).validate()


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    """Yield ``ahead`` forwards, then a forward and a backward in turn."""
    yield from forwards[:ahead]
    for pair in zip_longest(forwards[ahead:], backwards):
        yield from filter(None, pair)


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """All forwards of a rank's first stage, then of its second, and so on; then the backwards in opposite order.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022. Stages 0 and 2 on rank 0, two microbatches
    (in each cell: stage, kind, microbatch)::

        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0
        rank 1 | .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        forwards = [Action(stage, Kind.FORWARD, m) for stage in stages for m in range(microbatches)]
        orders.append((*forwards, *(Action(a.stage, Kind.BACKWARD, a.microbatch) for a in reversed(forwards))))
    return PipelineSchedule(tuple(orders)).validate()


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """1F1B over rounds of microbatches, each of which passes all of a rank's stages before the next round.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training, 2021. Raises ScheduleError if the
    microbatches do not fill whole rounds. Stages 0 and 2 on rank 0, two microbatches::

        rank 0 | 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 .   0B1
        rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 .   1B1
    """
    orders = []
    for rank in range(ranks):
        forwards, backwards, per_round = _interleaved_stages(rank, ranks, microbatches, stages_per_rank)
        ahead = (stages_per_rank - 1) * per_round + 2 * (ranks - 1 - rank)
        orders.append(tuple(_in_turn(forwards, backwards, ahead)))
    return PipelineSchedule(tuple(orders)).validate()


def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """Interleaved 1F1B with split backwards; rank r computes weight gradients from its r-th backward on.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024 (its ZB-H1, interleaved). Raises ScheduleError if the
    microbatches do not fill whole rounds. Two stages a rank, two microbatches::

        rank 0 | 0F0 0F1 2F0 .   2I0 2W0 2F1 ...
    """
    orders = []
    for rank in range(ranks):
        forwards, backwards, per_round = _interleaved_stages(rank, ranks, microbatches, stages_per_rank)
        ahead = (stages_per_rank - 1) * per_round + (ranks - 1 - rank)
        order: list[Action] = []
        waiting: list[Action] = []
        for action in _in_turn(forwards, backwards, ahead):
            order.append(first_half(action))
            if action.kind is Kind.BACKWARD:
                waiting.append(second_half(action))
            if len(waiting) > rank:
                order.append(waiting.pop(0))
        orders.append((*order, *waiting))
    return PipelineSchedule(tuple(orders)).validate()


def _interleaved_stages(
    rank: int, ranks: int, microbatches: int, stages_per_rank: int
) -> tuple[list[Action], list[Action], int]:
    """Return a rank's forwards, its backwards, and the number of microbatches in a round."""
    count = max(1, microbatches // ranks)
    if microbatches % count:
        raise ScheduleError(f"{microbatches} microbatches on {ranks} ranks: {count} rounds of equal size are needed")
    per_round = microbatches // count
    stages = [rank + ranks * local for local in range(stages_per_rank)]
    rounds = [range(first, first + per_round) for first in range(0, microbatches, per_round)]
    forwards = [Action(stage, Kind.FORWARD, m) for of_round in rounds for stage in stages for m in of_round]
    backwards = [Action(stage, Kind.BACKWARD, m) for of_round in rounds for stage in stages[::-1] for m in of_round]
    return forwards, backwards, per_round


def zbv(ranks: int, microbatches: int) -> PipelineSchedule:
    """Two stages a rank in a V, backwards split so that weight gradients fill the bubble.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024. Rank r holds stages r and 2R - 1 - r.
    Two ranks, two microbatches::

        rank 0 | 0F0 0F1 .   .   3F0 3I0 3W0 ...
        rank 1 | .   1F0 2F0 1F1 2I0 ...
    """
    enough = max(2 * ranks - 1, microbatches)  # the pattern needs this many; absent microbatches are skipped
    orders = []
    for rank in range(ranks):
        down, up = _Chunk(rank), _Chunk(2 * ranks - 1 - rank)
        order = down.run("F", 2 * (ranks - rank) - 1)
        order += [action for _ in range(rank) for action in (*up.run("F"), *down.run("F"))]
        order += [action for _ in range(ranks - rank) for action in up.run("FIW")]
        while up.done["F"] < enough or down.done["F"] < enough:
            order += down.run("F") if down.done["F"] < enough else []
            order += [*down.run("IW"), *up.run("FIW")]
        order += [action for _ in range(rank) for action in (*down.run("I"), *up.run("I"))]
        order += [action for _ in range(ranks - rank) for action in down.run("IW")]
        order += up.run("W", enough - up.done["W"]) + down.run("W", enough - down.done["W"])
        orders.append(tuple(action for action in order if action.microbatch < microbatches))
    return PipelineSchedule(tuple(orders)).validate()


def v_with_whole_backwards(ranks: int, microbatches: int) -> PipelineSchedule:
    """``zbv`` with a whole backward in the place of each input gradient: a V on a host that does not split backwards.

    Two ranks, two microbatches::

        rank 0 | 0F0 0F1 .   .   3F0 3B0 ...
        rank 1 | .   1F0 2F0 1F1 2B0 ...
    """
    rows = zbv(ranks, microbatches).ranks
    whole = [tuple(backward_of(a) for a in row if a.kind is not Kind.WEIGHT_GRAD) for row in rows]
    return PipelineSchedule(tuple(whole)).validate()


def dualpipev(ranks: int, microbatches: int) -> PipelineSchedule:
    """Two stages a rank in a V, forwards of one paired with backwards of the other.

    Source: DeepSeek, DualPipe, 2025 (its V-shaped form, after Qi et al.). A pair counts as a forward and then a
    backward. Raises ScheduleError for fewer microbatches than stages. Two ranks, four microbatches::

        rank 0 | 0F0 0F1 0F2 .   3F0 3I0 3W0 3F1 0F3 ...
        rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 ...
    """
    if microbatches < 2 * ranks:
        raise ScheduleError(f"{microbatches} microbatches: DualPipeV needs at least one for each of {2 * ranks} stages")
    orders = []
    for rank in range(ranks):
        down, up, after = _Chunk(rank), _Chunk(2 * ranks - 1 - rank), ranks - 1 - rank
        order = down.run("F", 2 * after)
        order += [action for _ in range(rank + 1) for action in (*down.run("F"), *up.run("F"))]
        order += up.run("IWF", after)
        for _ in range(microbatches - 2 * ranks + rank + 1):
            order += [*down.run("F"), *up.run("BF"), *down.run("B")]
        for _ in range(after):
            order += [*up.run("BF"), *down.run("B")]
        waiting: list[Action] = []  # weight gradients of split backwards
        last = [chunk for _ in range(rank + 1) for chunk in (up, down)]
        order += [action for chunk in last[: rank + 1] for action in chunk.run("B")]
        for chunk in last[rank + 1 :]:
            order += chunk.split(waiting)
        for _ in range(after):
            order.append(waiting.pop(0))
            order += down.split(waiting)
        orders.append((*order, *waiting))
    return PipelineSchedule(tuple(orders)).validate()


class _Chunk:
    """One stage, with the number of microbatches that it has run for each kind of action."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.done: Counter[str] = Counter()

    def run(self, kinds: str, times: int = 1) -> list[Action]:
        """Return its next actions of these kinds, ``times`` times."""
        actions = []
        for kind in kinds * times:
            backward = kind in "BI"
            actions.append(Action(self.stage, Kind(kind), self.done["B"] if backward else self.done[kind]))
            self.done["B" if backward else kind] += 1
        return actions

    def split(self, waiting: list[Action]) -> list[Action]:
        """Return its next input gradient, and append the weight gradient to ``waiting``."""
        (action,) = self.run("I")
        waiting.append(Action(self.stage, Kind.WEIGHT_GRAD, action.microbatch))
        return [action]


_GENERATORS: dict[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_forward_one_backward,
    "interleaved": interleaved,
    "zbv": zbv,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "dualpipev": dualpipev,
    "looped_bfs": looped_bfs,
}
_STAGES_PER_RANK = {"gpipe": 1, "one_f_one_b": 1, "zbv": 2, "dualpipev": 2}  # others accept any number
NAMES = tuple(_GENERATORS)


def named_schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> PipelineSchedule:
    """The order of one of ``NAMES``; ``stages_per_rank`` is 1 for gpipe and one_f_one_b, else 2 unless given.

    Raises ScheduleError for an unknown name or an impossible size.

    >>> named_schedule("one_f_one_b", ranks=2, microbatches=2).to_text()
    [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1B0', '1F1', '1B1']]
    """
    if name not in _GENERATORS:
        raise ScheduleError(f"schedule {name!r} is not one of {', '.join(NAMES)}")
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"{name}: {ranks} ranks and {microbatches} microbatches: at least 1 of each is needed")
    fixed = _STAGES_PER_RANK.get(name)
    if fixed is None:
        return _GENERATORS[name](ranks, microbatches, stages_per_rank or 2)
    if stages_per_rank not in (None, fixed):
        raise ScheduleError(f"{name}: {stages_per_rank} stages per rank: it has {fixed}")
    return _GENERATORS[name](ranks, microbatches)
