import random

import pytest

from tf_adapters.measuring.estimates import Estimate, estimate, median, shrink, weighted_median


def test_outliers_move_neither_the_value_nor_the_error():
    quiet = [10.0, 10.1, 9.9, 10.05, 9.95]
    noisy = [*quiet, 500.0]
    assert estimate(noisy).value == pytest.approx(10.0, abs=0.1)
    assert estimate(noisy).error < 0.1


def test_nothing_gives_nothing():
    assert median([]) is None
    assert estimate([]) is None
    assert shrink({}) == {}


def test_the_error_is_that_of_a_median():
    rng = random.Random(0)
    medians = [estimate(rng.gauss(20, 2) for _ in range(40)) for _ in range(400)]
    spread = (sum((m.value - 20) ** 2 for m in medians) / len(medians)) ** 0.5
    assert sum(m.error for m in medians) / len(medians) == pytest.approx(spread, rel=0.15)


def test_differences_that_noise_explains_go_away():
    alike = shrink({m: Estimate(10 + 0.1 * m, 0.5) for m in range(4)})
    assert len(set(alike.values())) == 1
    assert alike[0] == pytest.approx(10.15)


def test_differences_beyond_the_noise_stay():
    kept = shrink({"first": Estimate(20.0, 0.1), "second": Estimate(10.0, 0.1), "third": Estimate(10.1, 0.1)})
    assert kept["first"] == pytest.approx(20.0, rel=0.01)
    assert kept["second"] == pytest.approx(10.0, rel=0.01)


def test_one_of_a_kind_is_what_was_measured():
    assert shrink({"only": Estimate(3.0, 1.0)}) == {"only": 3.0}


def test_the_weighted_median_has_half_of_the_weight_on_either_side() -> None:
    assert weighted_median([(3.0, 1.0), (1.0, 1.0), (2.0, 1.0)]) == 2.0
    assert weighted_median([(3.0, 5.0), (1.0, 1.0), (2.0, 1.0)]) == 3.0
    assert weighted_median([(1.0, 1.0), (2.0, 1.0)]) == 1.0
    assert weighted_median([(4.0, 0.5)]) == 4.0
