"""What one rank sends of its measurements."""

from __future__ import annotations

import pickle
import zlib

import numpy as np
import pytest
from schedules import one_f_one_b

from tf_adapters.measuring.compact import PackedBounds, PackedTraces
from tf_adapters.measuring.timer import Interval, Trace
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import PipelineSchedule

SCHEDULE = one_f_one_b(4, 8)


def bounds_of(rank: int, schedule: PipelineSchedule = SCHEDULE) -> dict:
    random = np.random.default_rng(rank)
    upper = {action: 10.0 + random.random() for action in schedule.ranks[rank]}
    return {action: Bounds(ms / 2 if action.freezable else ms, ms) for action, ms in upper.items()}


def trace_of(rank: int, seed: int = 0, schedule: PipelineSchedule = SCHEDULE) -> Trace:
    random = np.random.default_rng(seed)
    starts = np.cumsum(random.uniform(5.0, 10.0, len(schedule.ranks[rank])))
    return {a: Interval(start, start + 4.0) for a, start in zip(schedule.ranks[rank], starts.tolist(), strict=True)}


@pytest.mark.parametrize("rank", range(4))
def test_bounds_come_back(rank: int) -> None:
    bounds = bounds_of(rank)
    unpacked = PackedBounds.of(SCHEDULE, bounds).unpack(SCHEDULE)
    assert unpacked.keys() == bounds.keys()
    for action, of_action in bounds.items():
        assert unpacked[action].lower == pytest.approx(of_action.lower, rel=1e-6)
        assert unpacked[action].upper == pytest.approx(of_action.upper, rel=1e-6)
        assert action.freezable or unpacked[action].lower == unpacked[action].upper


def test_what_is_not_in_the_schedule_is_left_out() -> None:
    other = one_f_one_b(4, 4)
    assert set(PackedBounds.of(other, bounds_of(0)).unpack(other)) == set(other.ranks[0])
    assert PackedBounds.of(SCHEDULE, {}).unpack(SCHEDULE) == {}


def test_traces_come_back_with_the_numbers_of_their_steps() -> None:
    traces = [(number, trace_of(2, seed=number)) for number in (3, 5, 6)]
    unpacked = PackedTraces.of(SCHEDULE, traces).unpack(SCHEDULE)
    assert [number for number, _ in unpacked] == [3, 5, 6]
    for (_, before), (_, after) in zip(traces, unpacked, strict=True):
        assert before.keys() == after.keys()
        for action, interval in before.items():
            assert after[action].start_ms == pytest.approx(interval.start_ms, rel=1e-6)
            assert after[action].end_ms == pytest.approx(interval.end_ms, rel=1e-6)


def test_an_incomplete_step_is_left_out() -> None:
    whole = trace_of(1)
    cut = dict(list(whole.items())[:-1])
    packed = PackedTraces.of(SCHEDULE, [(1, whole), (2, cut), (3, whole)])
    assert packed.steps == (1, 3)
    assert PackedTraces.of(SCHEDULE, ()).unpack(SCHEDULE) == []


def test_a_rank_of_4096_actions_sends_64_kilobytes() -> None:
    schedule = one_f_one_b(2, 2048)
    bounds = PackedBounds.of(schedule, bounds_of(1, schedule))
    traces = PackedTraces.of(schedule, [(7, trace_of(1, schedule=schedule))])
    assert len(zlib.compress(pickle.dumps((bounds, traces)), 1)) < 64 * 1024
