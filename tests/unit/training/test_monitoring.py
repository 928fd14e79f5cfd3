"""Freeze ratios of mixed monitoring."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tf_adapters.training.freeze_ratios import mixed_ratio

MICROBATCHES = (2, 3, 4, 7, 8, 16, 33, 64)


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_every_step_freezes_nothing_in_one_microbatch_and_much_in_another(microbatches: int) -> None:
    for turn in range(2 * microbatches):
        for stage in range(3):
            ratios = sorted(mixed_ratio(turn, stage, m, microbatches) for m in range(microbatches))
            assert ratios[0] == 0.0
            assert ratios[1] > 0.0
            assert 1.0 - 0.5 / (microbatches - 1) <= ratios[-1] <= 1.0


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_ratios_of_a_step_are_spread_evenly(microbatches: int) -> None:
    ratios = sorted(mixed_ratio(3, 1, m, microbatches) for m in range(microbatches))[1:]
    gaps = [later - earlier for earlier, later in pairwise(ratios)]
    assert gaps == pytest.approx([1.0 / (microbatches - 1)] * len(gaps))


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_each_microbatch_takes_its_turn_at_every_ratio(microbatches: int) -> None:
    for microbatch in range(microbatches):
        spared = [turn for turn in range(microbatches) if mixed_ratio(turn, 0, microbatch, microbatches) == 0.0]
        assert len(spared) == 1


def test_the_stages_do_not_freeze_alike() -> None:
    one, other = ([mixed_ratio(0, stage, m, 8) for m in range(8)] for stage in (0, 1))
    assert one != other
    assert sorted(one) == sorted(other)


def test_a_single_microbatch_freezes_a_half() -> None:
    assert {mixed_ratio(turn, 0, 0, 1) for turn in range(5)} == {0.5}
