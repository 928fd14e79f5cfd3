"""Orders of a batch that nobody would plan, and transfers that arrive at any time."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tf_adapters.schedule.deferral import split
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


def random_order(host: PipelineSchedule, seed: int) -> PipelineSchedule:
    """An order that can run: any rank runs next, and any of what it may run.

    On each rank the forwards keep the host's order, the input gradients theirs, and a stage's weight gradients the
    order of its input gradients.
    """
    draw = random.Random(seed)
    greed = draw.random()  # for forwards: it decides how many microbatches a rank holds
    halves = split(host)
    left = [_Queues(row) for row in halves.ranks]
    rows: list[list[Action]] = [[] for _ in left]
    done: set[Action] = set()
    while any(queues.actions for queues in left):
        may = [(rank, a) for rank, queues in enumerate(left) for a in queues.first if _is_ready(a, halves, done)]
        weights = [greed if a.kind is Kind.FORWARD else 1.0 for _, a in may]
        (rank, action), *_ = draw.choices(may, weights)
        left[rank].remove(action)
        rows[rank].append(action)
        done.add(action)
    return PipelineSchedule(tuple(map(tuple, rows))).validate()


class _Queues:
    """What is left of a rank's row: forwards, input gradients, and the weight gradients of each stage."""

    def __init__(self, row: tuple[Action, ...]) -> None:
        self._queues: dict[Any, deque[Action]] = {}
        for action in row:
            self._queues.setdefault(self._of(action), deque()).append(action)

    @property
    def first(self) -> list[Action]:
        return [queue[0] for queue in self._queues.values() if queue]

    @property
    def actions(self) -> bool:
        return bool(self.first)

    def remove(self, action: Action) -> None:
        self._queues[self._of(action)].popleft()

    @staticmethod
    def _of(action: Action) -> Any:
        return (action.kind, action.stage) if action.kind is Kind.WEIGHT_GRAD else action.kind


def _is_ready(action: Action, order: PipelineSchedule, done: set[Action]) -> bool:
    before = {
        Kind.FORWARD: None,
        Kind.INPUT_GRAD: Action(action.stage, Kind.FORWARD, action.microbatch),
        Kind.WEIGHT_GRAD: Action(action.stage, Kind.INPUT_GRAD, action.microbatch),
    }[action.kind]
    source = order.source.get(action)
    return (before is None or before in done) and (source is None or source in done)


def late(transfer: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """A way to send or receive that begins up to 3 ms later."""
    draw = random.Random(seed)

    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(draw.choice((0.0, 0.0, 0.001, 0.003)))
        return transfer(*args, **kwargs)

    return run


def blocking(transfer: Callable[..., Any]) -> Callable[..., Any]:
    """A way to send or receive that returns once the tensor has arrived."""

    def run(*args: Any) -> Any:
        begun = transfer(*args)
        begun.wait()
        return begun._replace(work=SimpleNamespace(wait=lambda: None, is_completed=lambda: True))

    return run
