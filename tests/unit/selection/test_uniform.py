"""One draw for all microbatches of a step: chances, floors and ceilings, the work of each microbatch, purity."""

from dataclasses import replace
from hashlib import sha256
from math import prod

import numpy as np
import pytest

from tf_adapters.selection.freeze_units import FreezeUnit, freezable_work
from tf_adapters.selection.masks import StageMasks
from tf_adapters.selection.uniform import UniformSelection


def layers(*shapes, blocks):
    return [
        FreezeUnit((f"{block}.{position}",), float(prod(shape)), shape)
        for block in range(blocks)
        for position, shape in enumerate(shapes)
    ]


def limit(units, caps):
    return [replace(unit, cap=caps.get(unit.shape, 1.0)) for unit in units]


GPT = [(192, 64), (192,), (64, 64), (64,), (256, 64), (256,), (64, 256), (64,), (64,), (64,), (64,), (64,)]
LLAMA = [(64, 64), (16, 64), (16, 64), (64, 64), (224, 64), (224, 64), (64, 224), (64,), (64,)]
MODELS = {
    "gpt": layers(*GPT, blocks=8),
    "llama": layers(*LLAMA, blocks=8),
    "embedding": [FreezeUnit(("embedding",), 300.0 * 64, (300, 64)), *layers(*GPT, blocks=3)],
    "two tensors": layers((8, 8), (8,), blocks=1),
    "one tensor": layers((8, 8), blocks=1),
}
# What limits in the settings make of them: patterns as the settings' own, caps as shares of max_freeze_ratio.
LIMITED = {
    "gpt, norms": limit(MODELS["gpt"], {(64,): 0.5}),
    "gpt, one kind of matrix": limit(MODELS["gpt"], {(64, 256): 0.3}),
    "llama, three caps": limit(MODELS["llama"], {(224, 64): 0.75, (64, 224): 0.25, (64,): 0.1}),
    "embedding": limit(MODELS["embedding"], {(300, 64): 0.25}),
    "everything": limit(MODELS["gpt"], dict.fromkeys(GPT, 0.5)),
    "two tensors": limit(MODELS["two tensors"], {(8, 8): 0.4}),
    "one tensor": limit(MODELS["one tensor"], {(8, 8): 0.4}),
}
ALL = {**MODELS, **{f"{model}, limited": units for model, units in LIMITED.items()}}
DRAWS = 1500
RATIOS = (0.05, 0.37, 0.0, 0.8, 0.95, 1.0)  # of a step's microbatches
# A resumed run repeats its draws, with the next version too.
DIGESTS = {
    "gpt": "0068eddfdfa8d89e",
    "llama": "bcbdd86805373ff8",
    "embedding": "e9d873da1e8a6ed7",
    "two tensors": "ed9a7fee0ef691c3",
    "one tensor": "eb31ef3f1fc3c014",
}


def draws(units, ratios, count=DRAWS):
    """Bools [draws, units, microbatches]."""
    selection = UniformSelection(units)
    frozen = np.zeros((count, len(units), len(ratios)), bool)
    for draw in range(count):
        for microbatch, chosen in enumerate(selection.draw(ratios, np.random.default_rng([3, draw]))):
            frozen[draw, list(chosen), microbatch] = True
    return frozen


def shares(units, frozen):
    """Of the freezable work, [draws, microbatches]."""
    return np.einsum("dum,u->dm", frozen, [unit.work for unit in units]) / freezable_work(units)


def chances_of(units, ratios):
    """[units, microbatches]"""
    return np.outer([unit.cap for unit in units], ratios)


def check_floor_or_ceiling(frozen, chances):
    expected = chances.sum(1)
    assert np.all(frozen.sum(2) >= np.floor(expected + 1e-9))
    assert np.all(frozen.sum(2) <= np.ceil(expected - 1e-9))


@pytest.mark.parametrize(
    "units", [*MODELS.values(), *LIMITED.values()], ids=[*MODELS, *(f"limited {m}" for m in LIMITED)]
)
def test_every_unit_has_its_chance_in_each_microbatch_and_the_work_is_exact_in_expectation(units):
    frozen, chances = draws(units, RATIOS), chances_of(units, RATIOS)
    noise = np.sqrt(chances * (1 - chances) / DRAWS)
    assert np.all(np.abs(frozen.mean(0) - chances) <= 4.5 * noise)  # exactly, where a chance is 0 or 1
    # A microbatch's work scatters less than that of coin flips, which its mean is held against.
    works = np.array([unit.work for unit in units]) / freezable_work(units)
    flips = np.sqrt((works[:, None] ** 2 * chances * (1 - chances)).sum(0) / DRAWS)
    assert np.all(np.abs(shares(units, frozen).mean(0) - RATIOS) <= 4.5 * flips + 1e-12)
    check_floor_or_ceiling(frozen, chances)


@pytest.mark.parametrize("seed", range(40))
def test_over_a_step_every_unit_is_frozen_in_floor_or_ceiling_of_its_expected_microbatches(seed):
    rng = np.random.default_rng(seed)
    ratios = rng.choice([0.0, 0.25, 0.5, 0.8, 1.0, *rng.random(4)], rng.integers(1, 13)).tolist()
    caps = rng.choice([1.0, 0.5, 0.3], rng.integers(1, 3))
    units = [
        FreezeUnit((str(place),), float(rng.choice([1, 2, 3, 50])), (place % 2,), float(rng.choice(caps)))
        for place in range(rng.integers(1, 20))
    ]
    check_floor_or_ceiling(draws(units, ratios, 40), chances_of(units, ratios))


def test_no_unit_is_left_out_of_a_step_whose_ratios_leave_it_one_microbatch():
    """Draws of each microbatch by itself leave a unit out of 17% of steps at 0.8 of eight microbatches."""
    assert not draws(MODELS["gpt"], [0.8] * 8, 300).all(2).any()


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("ratios", [(0.3,) * 5, (0.5, 0.6, 0.7), (0.8,) * 8, (0.57,) * 6], ids=str)
def test_each_microbatch_is_within_two_percent_of_its_planned_work(model, ratios):
    units = MODELS[model]
    off = np.abs(shares(units, draws(units, ratios, 400)) - ratios)
    assert off.max() <= 0.02


@pytest.mark.parametrize("model", ["gpt, norms", "gpt, one kind of matrix", "llama, three caps", "everything"])
def test_with_limits_each_microbatch_is_close_to_its_planned_work_too(model):
    units, ratios = LIMITED[model], (0.3, 0.5, 0.7, 0.57)
    off = np.abs(shares(units, draws(units, ratios, 600)) - ratios)
    assert off.max() * freezable_work(units) / sum(unit.work for unit in units) <= 0.035


def test_a_microbatch_is_as_near_to_its_work_as_one_that_is_drawn_by_itself():
    """Nearly, over stages and plans: where the step's total is exact, what one misses another one has too much."""
    plans = [(0.8,) * 8, (0.57,) * 8, (0.0, 0.35, 0.9, 1.0, 1.0, 0.62, 0.99, 0.4)]
    together, alone = [], []
    for units in (layers(*GPT, blocks=2), layers(*LLAMA, blocks=4), MODELS["embedding"]):
        for ratios in plans:
            together.append(float((shares(units, draws(units, ratios, 60)) - ratios).std()))
            by_itself = [shares(units, draws(units, [ratio], 60)) - ratio for ratio in ratios]
            alone.append(float(np.std(by_itself)))
    assert np.mean(together) <= 1.1 * np.mean(alone)


def test_with_limits_equal_units_are_frozen_floor_or_ceiling_times():
    units = limit(layers((8, 8), blocks=10), {(8, 8): 0.5})
    half, full = draws(units, [0.5], 200), draws(units, [1.0], 200)
    assert set(half.sum(1).ravel()) == {2, 3}
    assert set(full.sum(1).ravel()) == {5}


def test_a_full_ratio_freezes_what_has_no_limit_and_rounds_the_rest_among_itself():
    units = LIMITED["llama, three caps"]
    certain = [index for index, unit in enumerate(units) if unit.cap == 1.0]
    frozen = draws(units, [1.0, 0.5, 1.0], 300)
    assert frozen[:, certain][:, :, [0, 2]].all()
    assert np.abs(shares(units, frozen) - [1.0, 0.5, 1.0])[:, [0, 2]].max() <= 0.02


@pytest.mark.parametrize("model", MODELS)
def test_draws_are_what_they_were(model):
    masks, digest = StageMasks({0: MODELS[model]}, seed=5), sha256()
    for step in range(1, 6):
        for mask in masks.draw(step, 0, RATIOS):
            digest.update(repr((mask.names, mask.share, mask.complete)).encode())
    assert digest.hexdigest()[:16] == DIGESTS[model]


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_equal_layers_that_divide_evenly_are_met_exactly(ratio):
    units = layers((8, 8), blocks=8)
    assert set(shares(units, draws(units, [ratio] * 3, 200)).ravel()) == {ratio}


def test_every_shape_gets_its_part():
    units = layers((256, 64), (64, 256), blocks=8)
    of_shape = [index for index, unit in enumerate(units) if unit.shape == (64, 256)]
    assert np.all(draws(units, [0.5] * 3, 200)[:, of_shape].sum(1) == 4)


def test_nothing_and_everything():
    units = MODELS["gpt"]
    frozen = draws(units, [0.0, 1.0], 1)
    assert not frozen[:, :, 0].any()
    assert frozen[:, :, 1].all()
    assert UniformSelection([]).draw([0.5], np.random.default_rng(0)) == [frozenset()]
    assert UniformSelection(units).draw([], np.random.default_rng(0)) == []


def test_masks_are_a_pure_function_of_seed_step_stage_and_microbatch():
    units = {0: MODELS["gpt"], 1: MODELS["llama"]}
    first, again = StageMasks(units, seed=5), StageMasks(units, seed=5)
    keys = [(step, stage) for step in (1, 2) for stage in (0, 1)]
    masks = [first.draw(*key, [0.5] * 3) for key in keys]
    assert masks == [again.draw(*key, [0.5] * 3) for key in reversed(keys)][::-1]
    assert len({of_stage[0].names for of_stage in masks}) == len(keys)
    assert StageMasks(units, seed=6).draw(1, 0, [0.5] * 3) != masks[0]


def test_a_mask_knows_its_share_and_whether_it_is_complete():
    masks = StageMasks({0: layers((4, 4), blocks=4)}, seed=0)
    half, full, none = masks.draw(1, 0, [0.5, 1.0, 0.0])
    assert half.share == 0.5
    assert not half.complete
    assert full.complete
    assert none.names == ()
