"""Selection by rows: the same chance for every row, and nearly the exact work in every draw."""

import hashlib
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from test_uniform_selection import MODELS as WHOLE

from tf_adapters.selection.hybrid import HybridSelection
from tf_adapters.selection.masks import StageMasks
from tf_adapters.selection.rows import FrozenRows
from tf_adapters.selection.uniform import UniformSelection
from tf_adapters.selection.units import FreezeUnit, frozen_share


def layers(*shapes, blocks=1):
    """Matrices have rows, vectors have none."""
    return [
        FreezeUnit((f"{block}.{place}",), float(prod(shape)), shape, shape[0] if len(shape) == 2 else 0)
        for block in range(blocks)
        for place, shape in enumerate(shapes)
    ]


FUSED = FreezeUnit(("experts",), 900.0, (30, 30))  # larger than all that has rows, and has none
MODELS = {
    "two tensors": layers((16, 8), (24, 16)),
    "one tensor": layers((7, 3)),
    "two shapes of equal work": layers((16, 8), (8, 16), blocks=2),
    "blocks": layers((24, 8), (24,), (8, 8), (8,), (32, 8), (32,), (8, 32), (8,), blocks=3),
    "many rows": layers((1024, 2)),
    "large without rows": [FUSED, *layers((16, 8), (8,), blocks=2)],
}
RATIOS = [0.05, 0.37, 0.5, 0.8, 0.95]
DRAWS = 3000


def draws(selection, ratio, count=DRAWS):
    return [selection.draw(ratio, np.random.default_rng([3, draw])) for draw in range(count)]


def share(units, drawn):
    return frozen_share(units, drawn.whole, {index: count for index, (_, count) in drawn.partial.items()})


def row_chances(units, drawn):
    """How often each row of each unit was frozen."""
    counts = [np.zeros(max(unit.rows, 1)) for unit in units]
    for draw in drawn:
        for index in draw.whole:
            counts[index] += 1
        for index, (first, count) in draw.partial.items():
            for start, stop in FrozenRows((), first, count, units[index].rows).frozen:
                counts[index][start:stop] += 1
    return [of_unit / len(drawn) for of_unit in counts]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_every_row_has_the_same_chance(model, ratio):
    units = MODELS[model]
    noise = np.sqrt(ratio * (1 - ratio) / DRAWS)
    for chances in row_chances(units, draws(UniformSelection(units), ratio)):
        assert np.abs(chances - ratio).max() < 4.5 * noise


@pytest.mark.parametrize("model", ["two tensors", "blocks", "large without rows"])
@pytest.mark.parametrize("ratio", [0.37, 0.8, 1.0])
def test_under_limits_every_row_has_its_caps_share_of_the_chance(model, ratio):
    caps = (1.0, 0.25, 0.6)
    units = [replace(unit, cap=caps[place % 3]) for place, unit in enumerate(MODELS[model])]
    drawn = draws(UniformSelection(units), ratio)
    for unit, chances in zip(units, row_chances(units, drawn), strict=True):
        chance = ratio * unit.cap
        assert np.abs(chances - chance).max() <= 4.5 * np.sqrt(chance * (1 - chance) / DRAWS)
    assert np.mean([share(units, one) for one in drawn]) == pytest.approx(ratio, abs=0.02)


@pytest.mark.parametrize("model", ["two tensors", "one tensor", "two shapes of equal work", "blocks"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_every_draw_is_within_a_row_of_the_planned_work_in_each_stratum(model, ratio):
    units = MODELS[model]
    of_strata = {unit.work: max(u.work / u.rows for u in units if u.work == unit.work) for unit in units if unit.rows}
    most = sum(of_strata.values()) / sum(unit.work for unit in units)
    shares = np.array([share(units, drawn) for drawn in draws(UniformSelection(units), ratio, 300)])
    assert np.abs(shares - ratio).max() <= most + 1e-12


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_two_tensors_whose_rows_divide_evenly_are_met_exactly(ratio):
    units = MODELS["two tensors"]
    assert {share(units, drawn) for drawn in draws(UniformSelection(units), ratio, 100)} == {ratio}


def test_one_unit_of_a_stratum_at_most_is_frozen_in_part():
    units = MODELS["blocks"]
    for drawn in draws(UniformSelection(units), 0.4, 200):
        works = [units[index].work for index in drawn.partial]
        assert len(works) == len(set(works))
        assert not drawn.whole & set(drawn.partial)
        assert all(0 < count < units[index].rows for index, (_, count) in drawn.partial.items())


def test_of_many_rows_groups_of_eight_are_frozen():
    for drawn in draws(UniformSelection(MODELS["many rows"]), 0.37, 200):
        ((first, count),) = drawn.partial.values()
        assert first % 8 == 0
        assert count in (376, 384)


def test_nothing_and_everything():
    units = MODELS["blocks"]
    (nothing,), (everything,) = (draws(UniformSelection(units), ratio, 1) for ratio in (0.0, 1.0))
    assert (nothing.whole, nothing.partial) == (frozenset(), {})
    assert (everything.whole, everything.partial) == (frozenset(range(len(units))), {})


@pytest.mark.parametrize("ratio", RATIOS)
def test_what_is_preferred_comes_first(ratio):
    units = MODELS["blocks"]
    preferred = frozenset(range(10))
    of_preferred = frozen_share(units, preferred)
    drawn = draws(HybridSelection(units, preferred), ratio, DRAWS)
    filled = ratio > of_preferred
    inner = 1.0 if filled else ratio / of_preferred
    outer = (ratio - of_preferred) / (1 - of_preferred) if filled else 0.0
    for index, chances in enumerate(row_chances(units, drawn)):
        expected = inner if index in preferred else outer
        assert np.abs(chances - expected).max() <= 4.5 * np.sqrt(expected * (1 - expected) / DRAWS)
    assert np.mean([share(units, d) for d in drawn]) == pytest.approx(ratio, abs=1e-3)


def test_masks_of_whole_tensors_are_the_same_in_every_release():
    """Pinned: a run that goes on after an update repeats its masks."""
    masks = StageMasks(dict(enumerate(WHOLE.values())), seed=5)
    digest = hashlib.sha256()
    for step, stage, (m, ratio) in product(range(20), masks.stages, enumerate((0.05, 0.3, 0.5, 0.77, 1.0))):
        for preferred in (frozenset(), frozenset(range(0, len(masks.units[stage]), 3))):
            mask = masks.draw(step, stage, m, ratio, preferred)
            digest.update(repr((mask.names, mask.share, mask.complete)).encode())
    assert digest.hexdigest()[:16] == "e39f924c698212d9"


def test_masks_name_the_rows_and_are_a_pure_function():
    units = {0: MODELS["two tensors"], 1: MODELS["blocks"]}
    first, again = StageMasks(units, seed=5), StageMasks(units, seed=5)
    keys = [(step, stage, m) for step in (1, 2) for stage in (0, 1) for m in (0, 1)]
    masks = [first.draw(*key, 0.5) for key in keys]
    assert masks == [again.draw(*key, 0.5) for key in reversed(keys)][::-1]
    assert len({mask.rows for mask in masks}) == len(keys)
    assert first.draw(1, 0, 0, 0.5).names == ()
    assert {rows.names: (rows.count, rows.total) for rows in masks[0].rows} == {("0.0",): (8, 16), ("0.1",): (12, 24)}
    assert masks[0].share == 0.5
    assert not masks[0].complete
    assert first.draw(1, 0, 0, 1.0).complete


def test_with_a_preference_masks_have_rows_too():
    masks = StageMasks({0: MODELS["two tensors"]}, seed=0)
    mask = masks.draw(1, 0, 0, 0.9, frozenset({1}))
    assert mask.names == ("0.1",)
    assert [rows.names for rows in mask.rows] == [("0.0",)]
    assert mask.share == pytest.approx(0.9, abs=0.02)
