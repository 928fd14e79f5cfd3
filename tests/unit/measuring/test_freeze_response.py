"""The line from nothing frozen to everything frozen, fitted to samples of a timer that the test fills."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from clocks import BACKWARD, Filled
from schedules import gpipe

from tf_adapters.measuring.phase import Phase
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.training.freeze_ratios import mixed_ratio

UPPER, LOWER, MIXED = Phase.MONITORING_UPPER, Phase.MONITORING_LOWER, Phase.MONITORING_MIXED
FORWARD = Action.parse("1F0")


def filled(*samples: tuple[Phase, Action, float, float]) -> Filled:
    found = Filled()
    for sample in samples:
        found.add(*sample)
    return found


def monitored(
    steps: int,
    line: Callable[[float], float],
    noise: float = 0.0,
    stage: int = 1,
    microbatches: int = 8,
    spoilt: tuple[int, ...] = (),
    pace: Callable[[int], float] = lambda step: 1.0,
) -> Filled:
    """``steps`` of mixed monitoring; ``line`` gives ms of a share, ``spoilt`` steps take three times as long."""
    found, rngs = Filled(), {Kind.FORWARD: np.random.default_rng(8), Kind.BACKWARD: np.random.default_rng(7)}
    for step in range(steps):
        phase, slow = (UPPER, MIXED)[step % 2], 3.0 if step in spoilt else pace(step)
        for m in range(microbatches):
            share = mixed_ratio(step // 2, stage, m, microbatches) if phase is MIXED else 0.0
            works = {Kind.FORWARD: 6.0, Kind.BACKWARD: line(share)}
            for kind, ms in works.items():
                of_kind = share if kind is Kind.BACKWARD else 0.0
                found.add(
                    phase, Action(stage, kind, m), of_kind, slow * ms * (1 + noise * rngs[kind].standard_normal())
                )
    return found


def test_complete_masks_are_the_lower_bound_themselves() -> None:
    found = filled((UPPER, BACKWARD, 0, 20.0), (LOWER, BACKWARD, 1, 9.0), (LOWER, BACKWARD, 1, 10.0))
    found.add(LOWER, BACKWARD, 1, 11.0)
    assert found.bounds() == Bounds(pytest.approx(10.0), 20.0)


def test_partial_masks_are_extended_along_the_line_through_the_upper_bound() -> None:
    found = filled((UPPER, BACKWARD, 0, 20.0), *((MIXED, BACKWARD, x, 20 - 10 * x) for x in (0.5, 0.8, 0.25)))
    assert found.bounds() == Bounds(pytest.approx(10.0), 20.0)


def test_what_freezes_most_counts_most() -> None:
    """An error of a millisecond at a tenth of the work would be ten at all of it."""
    found = filled((UPPER, BACKWARD, 0, 20.0), (MIXED, BACKWARD, 0.1, 18.0), (MIXED, BACKWARD, 0.9, 11.0))
    assert found.bounds() == Bounds(pytest.approx(10.0), 20.0)


def test_stage_0_frozen_whole_is_no_point_of_the_line() -> None:
    """Its backward vanishes, far below the line that partial masks follow; in other stages it is a point as any."""
    first = Action.parse("0B0")
    samples = ((0.5, 15.0), (1.0, 0.1), (1.0, 0.1))
    assert filled((UPPER, first, 0, 20.0), *((MIXED, first, *s) for s in samples)).bounds(first).lower == 10.0
    assert filled((UPPER, BACKWARD, 0, 20.0), *((MIXED, BACKWARD, *s) for s in samples)).bounds().lower < 0.2


def test_masks_that_freeze_more_than_a_ratio_of_one_does_on_average_are_points_too() -> None:
    """Under ``freeze_limits``."""
    assert filled((UPPER, BACKWARD, 0, 20.0), (MIXED, BACKWARD, 1.25, 7.5)).bounds().lower == pytest.approx(10.0)


def test_a_stage_0_of_one_tensor_has_only_whole_masks() -> None:
    first = Action.parse("0B0")
    assert filled((UPPER, first, 0, 20.0), (MIXED, first, 1, 0.1)).bounds(first).lower == pytest.approx(0.1)


def test_samples_with_nothing_frozen_say_nothing_about_the_lower_bound() -> None:
    assert filled((UPPER, BACKWARD, 0, 20.0), (MIXED, BACKWARD, 0, 3.0)).bounds() == Bounds(20.0, 20.0)
    assert filled((UPPER, BACKWARD, 0, 20.0)).bounds() == Bounds(20.0, 20.0)
    mixed = filled((UPPER, BACKWARD, 0, 20.0), (MIXED, BACKWARD, 0, 3.0), (MIXED, BACKWARD, 1, 10.0))
    assert mixed.bounds() == Bounds(pytest.approx(10.0), 20.0)


def test_one_slope_serves_all_microbatches_and_each_keeps_its_own_time() -> None:
    """Longer sequences take longer, frozen and unfrozen alike."""
    short, long = Action.parse("1B0"), Action.parse("1B1")
    found = filled((UPPER, short, 0, 10.0), (UPPER, long, 0, 30.0), (LOWER, short, 1, 5.0), (LOWER, long, 1, 15.0))
    assert found.bounds(short) == Bounds(pytest.approx(5.0), 10.0)
    assert found.bounds(long) == Bounds(pytest.approx(15.0), 30.0)


def test_microbatches_that_take_about_as_long_save_the_same_ms() -> None:
    cold, warm = Action.parse("1B0"), Action.parse("1B1")
    found = filled((UPPER, cold, 0, 18.0), (UPPER, warm, 0, 22.0), (LOWER, cold, 1, 9.0), (LOWER, warm, 1, 11.0))
    assert found.bounds(cold) == Bounds(pytest.approx(8.0), 18.0)
    assert found.bounds(warm) == Bounds(pytest.approx(12.0), 22.0)


def test_a_plan_from_measured_times_takes_no_microbatch_out_of_every_step() -> None:
    """Small differences between microbatches are no reason to freeze the same ones whole and never learn from them."""
    found = Filled()
    for microbatch, ms in enumerate((19.0, 20.6, 20.1, 19.7, 20.9, 20.3, 19.9, 20.5)):
        for stage in range(2):
            found.add(UPPER, Action(stage, Kind.FORWARD, microbatch), 0, 10.0)
            found.add(UPPER, Action(stage, Kind.BACKWARD, microbatch), 0, ms)
            found.add(LOWER, Action(stage, Kind.BACKWARD, microbatch), 0.8, ms * 0.6)
    planned = plan(gpipe(2, 8), found.times().bounds(), 0.8)
    last_stage = [ratio for action, ratio in planned.freeze_ratio.items() if action.stage == 1]
    assert sum(last_stage) == pytest.approx(0.8 * 8)
    assert min(last_stage) > 0.5
    assert last_stage.count(1.0) <= 2


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_ten_mixed_steps_of_a_quiet_machine_tell_both_bounds_to_two_percent(noise: float) -> None:
    found = monitored(10, lambda share: 20.0 - 10.0 * share, noise)
    bounds = [found.bounds(Action(1, Kind.BACKWARD, microbatch)) for microbatch in range(8)]
    assert np.mean([of_one.upper for of_one in bounds]) == pytest.approx(20.0, rel=0.02)
    assert np.mean([of_one.lower for of_one in bounds]) == pytest.approx(10.0, rel=0.02)
    assert [of_one.upper for of_one in bounds] == pytest.approx([20.0] * 8, rel=0.04)
    assert found.times().error < 0.02


def test_a_step_that_something_else_held_up_moves_nothing() -> None:
    clean, spoilt = (monitored(10, lambda share: 20 - 10 * share, 0.01, spoilt=steps) for steps in ((), (2, 5)))
    assert spoilt.bounds().lower == pytest.approx(clean.bounds().lower, rel=0.03)


def test_what_slows_whole_steps_down_cancels() -> None:
    paces = np.random.default_rng(1).uniform(0.7, 1.4, size=10)
    busy = monitored(10, lambda share: 20 - 10 * share, 0.01, pace=lambda step: float(paces[step])).times()
    assert busy.responses[1, Kind.BACKWARD].value == pytest.approx(0.5, rel=0.02)
    assert busy.error > 0.05  # of the unfrozen times: monitoring goes on


def test_more_noise_is_more_error_and_more_steps_less() -> None:
    errors = [
        monitored(steps, lambda share: 20 - 10 * share, noise).times().error
        for steps, noise in ((10, 0.01), (10, 0.2), (160, 0.2))
    ]
    assert errors[0] < errors[2] < errors[1]


def test_what_was_never_seen_frozen_has_no_error_but_its_own_time() -> None:
    times = filled((UPPER, BACKWARD, 0, 20.0)).times()
    assert times.responses == {}
    assert times.error == 0.0


def test_half_backwards_have_lines_of_their_own() -> None:
    """W has nothing left when everything is frozen; I does not freeze."""
    inputs, weights = Action.parse("1I0"), Action.parse("1W0")
    found = filled((UPPER, inputs, 0, 8.0), (UPPER, weights, 0, 10.0), (MIXED, weights, 0.5, 5.0))
    found.add(MIXED, inputs, 0.5, 7.0)
    assert found.bounds(weights) == Bounds(pytest.approx(0.0), 10.0)
    assert found.bounds(inputs) == Bounds(8.0, 8.0)
