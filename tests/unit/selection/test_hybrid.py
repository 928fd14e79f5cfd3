"""Hybrid selection: Algorithm 2's thinning and filling, in work; its probabilities and its single draws."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from math import prod

import numpy as np
import pytest

from tf_adapters.selection.freeze_units import FreezeUnit, frozen_share
from tf_adapters.selection.hybrid import HybridSelection
from tf_adapters.selection.masks import StageMasks

DRAWS = 1500
RATIOS = [0.05, 0.2, 0.5, 0.9]
BLOCK = [(192, 64), (192,), (64, 64), (64,), (256, 64), (256,), (64, 256), (64,), (64,), (64,)]
UNITS = [
    FreezeUnit((f"{block}.{position}",), float(prod(shape)), shape)
    for block in range(8)
    for position, shape in enumerate(BLOCK)
]
FIRST_BLOCKS = frozenset(range(3 * len(BLOCK)))  # as AutoFreeze prefers: 3/8 of the work
MATRICES = frozenset(i for i, unit in enumerate(UNITS) if unit.shape == (64, 256))  # as APF may
ONE = frozenset({2})
LIMITED = [replace(unit, cap={(256, 64): 0.5, (64,): 0.25}.get(unit.shape, 1.0)) for unit in UNITS]
PREFERRED = {"first blocks": FIRST_BLOCKS, "some matrices": MATRICES, "one": ONE}


# A resumed run repeats its draws, with the next version too.
DIGESTS = {"first blocks": "269eb168b577cd81", "some matrices": "b92ec0e01f952f64", "one": "c803759b3210e0a1"}


def draws(
    preferred: frozenset[int], ratios: list[float], count: int = DRAWS, units: list[FreezeUnit] = UNITS
) -> list[list[frozenset[int]]]:
    """What each microbatch freezes, draw by draw."""
    selection = HybridSelection(units, preferred)
    return [selection.draw(ratios, np.random.default_rng([5, draw])) for draw in range(count)]


def shares(units: list[FreezeUnit], drawn: list[list[frozenset[int]]]) -> np.ndarray:
    """Of the freezable work, [draws, microbatches]."""
    return np.array([[frozen_share(units, frozen) for frozen in of_step] for of_step in drawn])


def expected_chances(units: list[FreezeUnit], preferred: frozenset[int], ratio: float) -> np.ndarray:
    """Of each unit, from Algorithm 2 with work in the place of numbers."""
    share = StageMasks({0: units}, seed=0).share(0, preferred)
    inside, outside = (ratio / share, 0.0) if ratio < share else (1.0, (ratio - share) / (1 - share))
    return np.array([unit.cap * (inside if index in preferred else outside) for index, unit in enumerate(units)])


@pytest.mark.parametrize("units", [UNITS, LIMITED], ids=["no limits", "limits"])
@pytest.mark.parametrize("preferred", PREFERRED.values(), ids=PREFERRED)
def test_every_unit_has_the_chance_that_algorithm_2_gives_it(
    preferred: frozenset[int], units: list[FreezeUnit]
) -> None:
    drawn = draws(preferred, RATIOS, units=units)
    frozen = np.zeros((DRAWS, len(units), len(RATIOS)), bool)
    for number, of_step in enumerate(drawn):
        for microbatch, chosen in enumerate(of_step):
            frozen[number, list(chosen), microbatch] = True
    chances = np.stack([expected_chances(units, preferred, ratio) for ratio in RATIOS], axis=1)
    noise = np.sqrt(chances * (1 - chances) / DRAWS)
    assert np.all(np.abs(frozen.mean(0) - chances) <= 4.5 * noise)  # exactly, where a chance is 0 or 1
    ratios = np.array(RATIOS)
    assert np.all(np.abs(shares(units, drawn).mean(0) - ratios) < 4.5 * np.sqrt(ratios * (1 - ratios) / DRAWS))
    expected = chances.sum(1)
    assert np.all(frozen.sum(2) >= np.floor(expected + 1e-9))
    assert np.all(frozen.sum(2) <= np.ceil(expected - 1e-9))


def test_every_draw_is_close_to_the_budget() -> None:
    ratios = [0.1, 0.2, 0.3, 0.5, 0.7, 0.9]
    off = np.abs(shares(UNITS, draws(FIRST_BLOCKS, ratios, 600)) - ratios)
    assert off.mean(0).max() <= 0.01
    assert off.max() <= 0.04  # of the stage's work; fewer tensors than in a uniform draw


def test_with_limits_every_draw_is_close_to_the_budget_too() -> None:
    ratios = [0.3, 0.5, 0.7]
    off = np.abs(shares(LIMITED, draws(FIRST_BLOCKS, ratios, 600, LIMITED)) - ratios)
    assert off.mean(0).max() <= 0.03  # stable units and others are rounded each among themselves
    assert off.max() <= 0.06


def test_with_limits_what_is_stable_is_frozen_as_often_as_its_cap_allows_and_nothing_else_is() -> None:
    """APF and AutoFreeze alone: the ratio is the share of what is stable."""
    drawn = draws(FIRST_BLOCKS, [StageMasks({0: LIMITED}, seed=0).share(0, FIRST_BLOCKS)], units=LIMITED)
    found = np.bincount([unit for of_step in drawn for unit in of_step[0]], minlength=len(UNITS)) / DRAWS
    caps = np.array([unit.cap * (index in FIRST_BLOCKS) for index, unit in enumerate(LIMITED)])
    assert np.all(np.abs(found - caps) <= 4.5 * np.sqrt(caps * (1 - caps) / DRAWS))


@pytest.mark.parametrize("name", PREFERRED)
def test_masks_are_what_they_were(name: str) -> None:
    masks, digest = StageMasks({0: UNITS}, seed=5), sha256()
    for step in range(1, 6):
        for mask in masks.draw(step, 0, (0.05, 0.37, 0.8, 0.95, 1.0), PREFERRED[name]):
            digest.update(repr((mask.names, mask.share, mask.complete)).encode())
    assert digest.hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("preferred", PREFERRED.values(), ids=PREFERRED)
def test_a_budget_of_exactly_what_is_preferred_freezes_it_and_nothing_else(preferred: frozenset[int]) -> None:
    drawn = draws(preferred, [frozen_share(UNITS, preferred)] * 2, 25)
    assert {frozen for of_step in drawn for frozen in of_step} == {preferred}


def test_nothing_and_everything() -> None:
    everything = frozenset(range(len(UNITS)))
    assert draws(MATRICES, [0.0, 1.0], 1) == [[frozenset(), everything]]
    assert {frozen_share(UNITS, of_step[0]) > 0.4 for of_step in draws(everything, [0.5], 20)} == {True}


def test_masks_take_the_preferred_first_and_are_uniform_where_nothing_is() -> None:
    masks, again = (StageMasks({0: UNITS}, seed=3) for _ in range(2))
    uniform = masks.draw(1, 0, [0.5])[0]
    mask = masks.draw(1, 0, [0.5], FIRST_BLOCKS)[0]
    assert {name for i in FIRST_BLOCKS for name in UNITS[i].names} <= set(mask.names)
    assert again.draw(1, 0, [0.5], FIRST_BLOCKS)[0] == mask
    assert masks.draw(1, 0, [0.5], frozenset())[0] == uniform
    assert again.draw(1, 0, [0.5], MATRICES)[0] != mask
    assert masks.share(0, FIRST_BLOCKS) == 0.375
    assert masks.draw(1, 0, [0.375], FIRST_BLOCKS)[0].share == 0.375
