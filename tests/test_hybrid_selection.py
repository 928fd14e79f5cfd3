"""Hybrid selection: Algorithm 2's thinning and filling, in work; its probabilities and its single draws."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from math import prod

import numpy as np
import pytest
from test_uniform_selection import frequencies

from tf_adapters.selection.hybrid import HybridSelection
from tf_adapters.selection.masks import StageMasks
from tf_adapters.selection.units import FreezeUnit, frozen_share, preferred_share

DRAWS = 4000
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


# Of masks that were drawn before there were limits: a resumed run repeats them.
DIGESTS = {"first blocks": "80c4dbccf83a7ee0", "some matrices": "41cf78319f2117d7", "one": "11e10ce895f417f0"}


def draws(
    preferred: frozenset[int], ratio: float, count: int = DRAWS, units: list[FreezeUnit] = UNITS
) -> list[frozenset[int]]:
    selection = HybridSelection(units, preferred)
    return [selection.draw(ratio, np.random.default_rng([5, draw])) for draw in range(count)]


def expected_chances(units: list[FreezeUnit], preferred: frozenset[int], ratio: float) -> np.ndarray:
    """Of each unit, from Algorithm 2 with work in the place of numbers."""
    share = preferred_share(units, preferred)
    inside, outside = (ratio / share, 0.0) if ratio < share else (1.0, (ratio - share) / (1 - share))
    return np.array([unit.cap * (inside if index in preferred else outside) for index, unit in enumerate(units)])


@pytest.mark.parametrize("units", [UNITS, LIMITED], ids=["no limits", "limits"])
@pytest.mark.parametrize("preferred", PREFERRED.values(), ids=PREFERRED)
@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.5, 0.9])
def test_every_unit_has_the_chance_that_algorithm_2_gives_it(
    preferred: frozenset[int], ratio: float, units: list[FreezeUnit]
) -> None:
    drawn = draws(preferred, ratio, units=units)
    found = frequencies(UNITS, drawn)
    chances = expected_chances(units, preferred, ratio)
    noise = np.sqrt(chances * (1 - chances) / DRAWS)
    assert np.all(np.abs(found - chances) <= 4.5 * noise)  # exactly, where a chance is 0 or 1
    mean = np.mean([frozen_share(units, frozen) for frozen in drawn])
    assert abs(mean - ratio) < 4.5 * np.sqrt(ratio * (1 - ratio) / DRAWS)


@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.3, 0.5, 0.7, 0.9])
def test_every_draw_is_close_to_the_budget(ratio: float) -> None:
    shares = np.array([frozen_share(UNITS, frozen) for frozen in draws(FIRST_BLOCKS, ratio, 1000)])
    assert np.abs(shares - ratio).mean() <= 0.01
    assert np.abs(shares - ratio).max() <= 0.04  # of the stage's work; fewer tensors than in a uniform draw


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7])
def test_with_limits_every_draw_is_close_to_the_budget_too(ratio: float) -> None:
    shares = np.array([frozen_share(LIMITED, frozen) for frozen in draws(FIRST_BLOCKS, ratio, 1000, LIMITED)])
    assert np.abs(shares - ratio).mean() <= 0.03  # stable units and others are rounded each among themselves
    assert np.abs(shares - ratio).max() <= 0.06


def test_with_limits_what_is_stable_is_frozen_as_often_as_its_cap_allows_and_nothing_else_is() -> None:
    """APF and AutoFreeze alone: the ratio is the share of what is stable."""
    drawn = draws(FIRST_BLOCKS, preferred_share(LIMITED, FIRST_BLOCKS), units=LIMITED)
    found = frequencies(UNITS, drawn)
    caps = np.array([unit.cap * (index in FIRST_BLOCKS) for index, unit in enumerate(LIMITED)])
    assert np.all(np.abs(found - caps) <= 4.5 * np.sqrt(caps * (1 - caps) / DRAWS))


@pytest.mark.parametrize("name", PREFERRED)
def test_without_limits_masks_are_what_they_always_were(name: str) -> None:
    masks, digest = StageMasks({0: UNITS}, seed=5), sha256()
    for step in range(1, 6):
        for ratio in (0.05, 0.37, 0.8, 0.95, 1.0):
            mask = masks.draw(step, 0, step, ratio, PREFERRED[name])
            digest.update(repr((mask.names, mask.share, mask.complete)).encode())
    assert digest.hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("preferred", PREFERRED.values(), ids=PREFERRED)
def test_a_budget_of_exactly_what_is_preferred_freezes_it_and_nothing_else(preferred: frozenset[int]) -> None:
    assert set(draws(preferred, frozen_share(UNITS, preferred), 50)) == {preferred}


def test_nothing_and_everything() -> None:
    assert set(draws(MATRICES, 0.0, 5)) == {frozenset()}
    assert set(draws(MATRICES, 1.0, 5)) == {frozenset(range(len(UNITS)))}
    everything = frozenset(range(len(UNITS)))
    assert {frozen_share(UNITS, f) > 0.4 for f in draws(everything, 0.5, 20)} == {True}


def test_masks_take_the_preferred_first_and_are_uniform_where_nothing_is() -> None:
    masks, again = (StageMasks({0: UNITS}, seed=3) for _ in range(2))
    uniform = masks.draw(1, 0, 0, 0.5)
    mask = masks.draw(1, 0, 0, 0.5, FIRST_BLOCKS)
    assert {name for i in FIRST_BLOCKS for name in UNITS[i].names} <= set(mask.names)
    assert again.draw(1, 0, 0, 0.5, FIRST_BLOCKS) == mask
    assert masks.draw(1, 0, 0, 0.5, frozenset()) == uniform
    assert again.draw(1, 0, 0, 0.5, MATRICES) != mask
    assert masks.share(0, FIRST_BLOCKS) == 0.375
    assert masks.draw(1, 0, 0, 0.375, FIRST_BLOCKS).share == 0.375
