"""Measured bounds of all ranks, merged into the one set that the planner is given."""

from __future__ import annotations

import pytest
from schedules import gpipe

from tf_adapters.errors import TimelyFreezeError
from tf_adapters.measuring.replica_bounds import merge_bounds, slowest_durations
from tf_adapters.measuring.timer import Interval
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind

SCHEDULE = gpipe(2, 1)
F0, B0, F1, B1 = (Action.parse(text) for text in ("0F0", "0B0", "1F0", "1B0"))
STAGE_0 = {F0: Bounds(2.0, 2.0), B0: Bounds(3.0, 6.0)}
STAGE_1 = {F1: Bounds(2.5, 2.5), B1: Bounds(4.0, 8.0)}


def test_each_rank_brings_its_own_stage() -> None:
    merged, notes = merge_bounds(SCHEDULE, [STAGE_0, STAGE_1])
    assert merged == {**STAGE_0, **STAGE_1}
    assert notes == ()


def test_a_stage_takes_as_long_as_its_slowest_replica() -> None:
    other = {F0: Bounds(1.0, 1.0), B0: Bounds(3.5, 5.0)}
    merged, notes = merge_bounds(SCHEDULE, [STAGE_0, STAGE_1, other, STAGE_1])
    assert merged[F0] == Bounds(2.0, 2.0)
    assert merged[B0] == Bounds(3.5, 6.0)
    assert merged[B1] == Bounds(4.0, 8.0)
    assert notes == ()


def test_a_replica_that_sends_means_only_makes_its_stage_longer_by_as_much() -> None:
    two = gpipe(1, 2)
    detailed = {Action.parse(text): Bounds(*pair) for text, pair in {"0B0": (2, 4), "0B1": (4, 8)}.items()}
    detailed |= {Action.parse(text): Bounds(1, 1) for text in ("0F0", "0F1")}
    slower = {(0, Kind.BACKWARD): Bounds(3.0, 9.0), (0, Kind.FORWARD): Bounds(0.5, 0.5)}
    merged, notes = merge_bounds(two, [detailed], [slower])
    assert merged[Action.parse("0B0")] == Bounds(2.0, 6.0)
    assert merged[Action.parse("0B1")] == Bounds(4.0, 12.0)
    assert merged[Action.parse("0F0")] == Bounds(1.0, 1.0)
    assert notes == ()


def test_steps_of_the_traced_replica_are_as_long_as_the_slowest_ones() -> None:
    """What freezing saves of a step is then what it saves on the replica that the step waits for."""
    step = {action: Interval(100.0, 102.0) for action in (F0, B0, F1, B1)}
    own = [STAGE_0, STAGE_1]
    merged, _ = merge_bounds(SCHEDULE, own, [{(1, Kind.BACKWARD): Bounds(4.0, 12.0)}])
    assert slowest_durations([step], own, merged) == [{F0: 2.0, B0: 2.0, F1: 2.0, B1: 3.0}]
    alike, _ = merge_bounds(SCHEDULE, own)
    assert slowest_durations([step], own, alike) == [dict.fromkeys(step, 2.0)]


def test_bounds_that_noise_has_crossed_are_clamped_with_a_note() -> None:
    merged, notes = merge_bounds(SCHEDULE, [{**STAGE_0, B0: Bounds(6.5, 6.0)}, STAGE_1])
    assert merged[B0] == Bounds(6.0, 6.0)
    assert notes == ("0B0: measured 6.500 ms frozen, 6.000 ms unfrozen; taken as not freezable",)


def test_each_of_the_two_bounds_is_the_slowest_replicas_own() -> None:
    merged, notes = merge_bounds(SCHEDULE, [STAGE_0, STAGE_1, {**STAGE_0, B0: Bounds(5.9, 5.9)}])
    assert merged[B0] == Bounds(5.9, 6.0)
    assert notes == ()


def test_a_line_that_falls_below_zero_stops_there() -> None:
    merged, notes = merge_bounds(SCHEDULE, [{**STAGE_0, B0: Bounds(-1.0, 6.0)}, STAGE_1])
    assert merged[B0] == Bounds(0.0, 6.0)
    assert notes == ()


def test_an_action_that_nobody_measured_is_an_error_that_names_it() -> None:
    with pytest.raises(TimelyFreezeError, match=r"^1B0 was never measured during monitoring$"):
        merge_bounds(SCHEDULE, [STAGE_0, {F1: STAGE_1[F1]}])


def test_what_is_not_in_the_schedule_is_left_out() -> None:
    merged, _ = merge_bounds(SCHEDULE, [STAGE_0, STAGE_1, {Action.parse("0B7"): Bounds(1.0, 2.0)}])
    assert set(merged) == set(SCHEDULE.actions)
