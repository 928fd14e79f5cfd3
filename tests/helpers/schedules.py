"""Schedules for tests, made by pure generators; a dot in a diagram is an idle slot. And steps of them, on paper."""

from __future__ import annotations

import numpy as np

from tf_adapters.measuring.timer import Interval, Trace
from tf_adapters.measuring.transfers import Gaps
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

DURATION = {Kind.FORWARD: 10.0, Kind.BACKWARD: 20.0}


def gpipe(stages: int, microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards::

    rank 0 | F0 F1 F2 .  .  B0 B1 B2
    rank 1 | .  F0 F1 F2 B0 B1 B2
    """
    order = [(Kind.FORWARD, m) for m in range(microbatches)] + [(Kind.BACKWARD, m) for m in range(microbatches)]
    return PipelineSchedule(tuple(tuple(Action(stage, kind, m) for kind, m in order) for stage in range(stages)))


def one_f_one_b(stages: int, microbatches: int) -> PipelineSchedule:
    """Stage s runs S - s - 1 forwards ahead, then one forward and one backward in turn::

    rank 0 | F0 F1 .  B0 F2 B1 .  B2
    rank 1 | .  F0 B0 F1 B1 F2 B2
    """
    return PipelineSchedule(tuple(_one_f_one_b_rank(stage, stages, microbatches) for stage in range(stages)))


def split_one_f_one_b(stages: int, microbatches: int) -> PipelineSchedule:
    """1F1B with split backwards; stage s runs a weight gradient when it is s + 1 of them behind::

    rank 0 | F0 F1 .  I0 W0 F2 I1 W1 .  I2 W2
    rank 1 | .  F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    return PipelineSchedule(
        tuple(
            _with_split_backwards(_one_f_one_b_rank(stage, stages, microbatches), delay=stage)
            for stage in range(stages)
        )
    )


def split_gpipe(stages: int, microbatches: int) -> PipelineSchedule:
    """GPipe with split backwards, all weight gradients at the end::

    rank 0 | F0 F1 .  .  I0 I1 W0 W1
    rank 1 | .  F0 F1 I0 I1 W0 W1
    """
    return PipelineSchedule(
        tuple(_with_split_backwards(rank, delay=microbatches) for rank in gpipe(stages, microbatches).ranks)
    )


def v_shape(ranks: int, microbatches: int) -> PipelineSchedule:
    """Two stages a rank, down and up, all forwards first: rank r holds stages r and 2 * ranks - 1 - r."""
    rows = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        forwards = [Action(stage, Kind.FORWARD, m) for stage in (down, up) for m in range(microbatches)]
        backwards = [Action(stage, Kind.BACKWARD, m) for stage in (up, down) for m in range(microbatches)]
        rows.append((*forwards, *backwards))
    return PipelineSchedule(tuple(rows))


def traced(schedule: PipelineSchedule, gaps: Gaps, ahead: tuple[float, ...], seed: int = 0) -> list[Trace]:
    """One step as each rank's own clock sees it, which is ``ahead`` since the rank began its step by as much earlier.

    Durations vary by a few percent.
    """
    random = np.random.default_rng(seed)
    durations = {action: DURATION[action.kind] * random.uniform(0.95, 1.05) for action in schedule.actions}
    starts = PipelineDag.from_schedule(schedule, *gaps).start_times(durations)
    return [
        {action: Interval(starts[action] + clock, starts[action] + durations[action] + clock) for action in rank}
        for rank, clock in zip(schedule.ranks, ahead, strict=True)
    ]


def _one_f_one_b_rank(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    ahead = min(stages - stage - 1, microbatches)
    actions = [Action(stage, Kind.FORWARD, m) for m in range(ahead)]
    for m in range(microbatches):
        if ahead + m < microbatches:
            actions.append(Action(stage, Kind.FORWARD, ahead + m))
        actions.append(Action(stage, Kind.BACKWARD, m))
    return tuple(actions)


def _with_split_backwards(rank: tuple[Action, ...], delay: int) -> tuple[Action, ...]:
    out: list[Action] = []
    behind: list[Action] = []
    for action in rank:
        if action.kind is not Kind.BACKWARD:
            out.append(action)
            continue
        out.append(Action(action.stage, Kind.INPUT_GRAD, action.microbatch))
        behind.append(Action(action.stage, Kind.WEIGHT_GRAD, action.microbatch))
        if len(behind) > delay:
            out.append(behind.pop(0))
    return (*out, *behind)
