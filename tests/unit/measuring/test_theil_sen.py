"""The line through a busy machine's samples."""

from __future__ import annotations

import numpy as np
import pytest

from tf_adapters.measuring.estimates import Estimate
from tf_adapters.measuring.theil_sen import Point, _pairs, fit

SHARES = [0.0, 0.14, 0.29, 0.43, 0.57, 0.71, 0.86, 1.0]


def step(saved: float, pace: float = 1.0, shares: list[float] = SHARES) -> list[Point]:
    return [Point(share, pace * (1.0 - saved * share)) for share in shares]


def noisy(steps: int, saved: float, of_steps: float, of_samples: float) -> list[list[Point]]:
    """Steps whose paces differ, and samples that differ within a step; relative standard deviations."""
    rng = np.random.default_rng(4)
    return [
        [
            Point(p.share, p.left * float(rng.normal(1.0, of_samples)))
            for p in step(saved, float(rng.normal(1, of_steps)))
        ]
        for _ in range(steps)
    ]


def fitted(steps: list[list[Point]]) -> Estimate:
    found = fit(steps)
    assert found is not None
    return found


@pytest.mark.parametrize("saved", [0.0, 0.45, 1.0])
def test_what_a_whole_step_has_in_common_cancels(saved: float) -> None:
    """1.0 is a W: nothing is left of it once everything is frozen."""
    found = fitted([step(saved, pace) for pace in (0.4, 1.0, 3.0)])
    assert found.value == pytest.approx(saved)
    assert found.error == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("shares", [[0.5], [1.0] * 8, [0.78, 0.8, 0.82]])
def test_steps_of_one_share_are_compared_with_unfrozen_ones(shares: list[float]) -> None:
    found = fitted([step(0.45, pace, shares) for pace in (0.9, 1.0, 1.0, 1.0)])
    assert found.value == pytest.approx(0.45)
    assert fitted([step(0.45, 1.1, shares)]).value < 0.4  # nothing else tells the pace


def test_a_sample_that_something_held_up_moves_nothing() -> None:
    steps = [step(0.45) for _ in range(5)]
    steps[2][3] = Point(steps[2][3].share, 5.0)
    steps[4][6] = Point(steps[4][6].share, 3.0)
    assert fitted(steps).value == pytest.approx(0.45, abs=0.005)


@pytest.mark.parametrize("steps", [5, 20])
def test_the_error_is_about_what_it_says(steps: int) -> None:
    found = fitted(noisy(steps, 0.45, of_steps=0.2, of_samples=0.05))
    assert abs(found.value - 0.45) < 3.0 * found.error
    assert found.error < 0.15 / steps**0.5
    assert fitted(noisy(steps, 0.45, of_steps=0.2, of_samples=0.01)).error < found.error


def test_steps_of_many_microbatches_take_no_longer_than_they_must() -> None:
    """512 microbatches have 130,816 pairs."""
    rng = np.random.default_rng(2)
    shares = rng.permutation(512) / 511
    points = [Point(share, 1.7 * (1.0 - 0.45 * share) * rng.normal(1.0, 0.05)) for share in shares.tolist()]
    assert len(_pairs(points)) < 5 * 512
    assert fitted([points]).value == pytest.approx(0.45, abs=0.02)


def test_nothing_frozen_is_no_line() -> None:
    assert fit([]) is None
    assert fit([[], step(0.45, shares=[0.0, 0.0])]) is None


def test_samples_that_took_no_time_do_no_harm() -> None:
    assert fitted([[Point(0.0, 0.0), Point(0.5, 0.0), Point(1.0, 0.0)]] * 3).value == 1.0
