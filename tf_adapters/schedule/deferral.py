"""Orders with deferred weight gradients: a host's B becomes an I where it stands and a W where its rank would wait.

The idea is that of zero-bubble pipelines (Qi et al. 2024): nothing else in the batch needs a weight gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

__all__ = ["backward_of", "defer", "first_half", "most_in_flight", "split"]


def split(schedule: PipelineSchedule) -> PipelineSchedule:
    """Every B as an I with its W right after it."""
    return PipelineSchedule(
        tuple(tuple(half for action in rank for half in _halves(action)) for rank in schedule.ranks)
    )


def backward_of(half: Action) -> Action:
    """The B that an I or W is a half of; any other action itself."""
    return replace(half, kind=Kind.BACKWARD) if half.kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) else half


def first_half(action: Action) -> Action:
    """The I of a B: what its neighbours wait for; any other action itself."""
    return replace(action, kind=Kind.INPUT_GRAD) if action.kind is Kind.BACKWARD else action


def _halves(action: Action) -> tuple[Action, ...]:
    if action.kind is not Kind.BACKWARD:
        return (action,)
    return tuple(Action(action.stage, kind, action.microbatch) for kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))


def most_in_flight(schedule: PipelineSchedule) -> int:
    """The most microbatches that any rank holds at once: forwards begun whose weight gradients are not computed."""
    most = 0
    for rank in schedule.ranks:
        held = 0
        for action in rank:
            held += (action.kind is Kind.FORWARD) - action.freezable
            most = max(most, held)
    return most


def defer(
    schedule: PipelineSchedule,
    durations: Mapping[Action, float],
    delays: Mapping[tuple[Action, Action], float],
    limit: int,
) -> PipelineSchedule:
    """The order of F and I stays; each W runs when its rank would wait, or where a forward would exceed ``limit``."""
    parts = split(schedule)
    source = {target: source for source, target in parts.transfers()}
    rows = [deque(a for a in rank if a.kind is not Kind.WEIGHT_GRAD) for rank in parts.ranks]
    waiting: list[deque[Action]] = [deque() for _ in rows]
    clock, held = [0.0] * len(rows), [0] * len(rows)
    end: dict[Action, float] = {}
    order: list[list[Action]] = [[] for _ in rows]

    def run(rank: int, action: Action, start: float) -> None:
        clock[rank] = end[action] = start + durations[action]
        order[rank].append(action)

    def ready(action: Action) -> float | None:
        before = source.get(action)
        if before is None:
            return 0.0
        return end[before] + delays.get((before, action), 0.0) if before in end else None

    while any(rows) or any(waiting):
        rank = min((r for r in range(len(rows)) if _movable(rows[r], waiting[r], ready)), key=lambda r: clock[r])
        row, weights = rows[rank], waiting[rank]
        at = ready(row[0]) if row else None
        full = bool(row) and row[0].kind is Kind.FORWARD and held[rank] >= limit
        idle = at is None or at - clock[rank] >= 0.5 * durations[weights[0]] if weights else False
        if weights and (not row or full or idle):
            run(rank, weights.popleft(), clock[rank])
            held[rank] -= 1
            continue
        action = row.popleft()
        run(rank, action, max(clock[rank], at or 0.0))
        held[rank] += action.kind is Kind.FORWARD
        if action.kind is Kind.INPUT_GRAD:
            weights.append(Action(action.stage, Kind.WEIGHT_GRAD, action.microbatch))
    return PipelineSchedule(tuple(map(tuple, order))).validate()


def _movable(row: deque[Action], weights: deque[Action], ready: object) -> bool:
    return bool(weights) or (bool(row) and ready(row[0]) is not None)  # type: ignore[operator]
