from dataclasses import replace
from hashlib import sha256
from math import prod

import numpy as np
import pytest

from tf_adapters.selection.masks import StageMasks
from tf_adapters.selection.uniform import UniformSelection
from tf_adapters.selection.units import FreezeUnit, freezable_work, frozen_share


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
DRAWS = 4000
# Of draws that were made before there were limits: a resumed run repeats them.
DIGESTS = {
    "gpt": "3b4da755cabd7831",
    "llama": "8dcd892a75536761",
    "embedding": "b941bdab1fa3272c",
    "two tensors": "1d6c4c913e1f8552",
    "one tensor": "0be4a1b9f108e07c",
}


def draws(units, ratio, count=DRAWS):
    selection = UniformSelection(units)
    return [selection.draw(ratio, np.random.default_rng([3, draw])) for draw in range(count)]


def frequencies(units, drawn):
    """How often each unit was frozen, as a share of the draws."""
    return np.bincount([index for frozen in drawn for index in frozen], minlength=len(units)) / len(drawn)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ratio", [0.05, 0.37, 0.8, 0.95])
def test_every_unit_has_the_same_chance_and_the_work_is_exact_in_expectation(model, ratio):
    units = MODELS[model]
    drawn = draws(units, ratio)
    noise = np.sqrt(ratio * (1 - ratio) / DRAWS)
    assert np.abs(frequencies(units, drawn) - ratio).max() < 4.5 * noise
    # Units of one draw are correlated only towards the planned work, so its mean is no noisier than a coin's.
    assert abs(np.mean([frozen_share(units, f) for f in drawn]) - ratio) < 4.5 * noise


@pytest.mark.parametrize("model", LIMITED)
@pytest.mark.parametrize("ratio", [0.05, 0.37, 0.8, 1.0])
def test_with_limits_every_unit_has_its_cap_times_the_chance_and_the_work_is_exact_in_expectation(model, ratio):
    units = LIMITED[model]
    drawn = draws(units, ratio)
    chances = np.array([ratio * unit.cap for unit in units])
    assert np.all(np.abs(frequencies(units, drawn) - chances) <= 4.5 * np.sqrt(chances * (1 - chances) / DRAWS))
    shares = np.array([frozen_share(units, f) for f in drawn])
    assert abs(shares.mean() - ratio) <= 4.5 * shares.std() / np.sqrt(DRAWS) + 1e-9


@pytest.mark.parametrize("model", ["gpt, norms", "gpt, one kind of matrix", "llama, three caps", "everything"])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7])
def test_with_limits_every_single_draw_is_close_to_the_planned_work_too(model, ratio):
    units = LIMITED[model]
    shares = np.array([frozen_share(units, f) for f in draws(units, ratio, 1000)])
    off = np.abs(shares - ratio) * freezable_work(units) / sum(unit.work for unit in units)
    assert off.max() <= 0.035


def test_with_limits_equal_units_are_frozen_floor_or_ceiling_times():
    units = limit(layers((8, 8), blocks=10), {(8, 8): 0.5})
    assert {len(f) for f in draws(units, 0.5, 200)} == {2, 3}
    assert {len(f) for f in draws(units, 1.0, 200)} == {5}


def test_a_full_ratio_freezes_what_has_no_limit_and_rounds_the_rest_among_itself():
    units = LIMITED["llama, three caps"]
    certain = {index for index, unit in enumerate(units) if unit.cap == 1.0}
    drawn = draws(units, 1.0, 500)
    assert all(certain <= frozen for frozen in drawn)
    assert np.abs(np.array([frozen_share(units, f) for f in drawn]) - 1.0).max() <= 0.02


@pytest.mark.parametrize("model", MODELS)
def test_without_limits_draws_are_what_they_always_were(model):
    masks, digest = StageMasks({0: MODELS[model]}, seed=5), sha256()
    for step in range(1, 6):
        for ratio in (0.05, 0.37, 0.8, 0.95, 1.0):
            mask = masks.draw(step, 0, step, ratio)
            digest.update(repr((mask.names, mask.share, mask.complete)).encode())
    assert digest.hexdigest()[:16] == DIGESTS[model]


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7])
def test_every_single_draw_is_within_two_percent_of_the_planned_work(model, ratio):
    shares = [frozen_share(MODELS[model], f) for f in draws(MODELS[model], ratio)]
    assert np.abs(np.array(shares) - ratio).max() <= 0.02


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_equal_layers_that_divide_evenly_are_met_exactly(ratio):
    units = layers((8, 8), blocks=8)
    assert {frozen_share(units, f) for f in draws(units, ratio, 200)} == {ratio}


def test_every_shape_gets_its_part():
    units = layers((256, 64), (64, 256), blocks=8)
    for frozen in draws(units, 0.5, 200):
        assert sum(units[i].shape == (64, 256) for i in frozen) == 4


def test_nothing_and_everything():
    units = MODELS["gpt"]
    assert draws(units, 0.0, 1) == [frozenset()]
    assert draws(units, 1.0, 1) == [frozenset(range(len(units)))]
    assert UniformSelection([]).draw(0.5, np.random.default_rng(0)) == frozenset()


def test_masks_are_a_pure_function_of_seed_step_stage_and_microbatch():
    units = {0: MODELS["gpt"], 1: MODELS["llama"]}
    first, again = StageMasks(units, seed=5), StageMasks(units, seed=5)
    keys = [(step, stage, m) for step in (1, 2) for stage in (0, 1) for m in (0, 1, 2)]
    masks = [first.draw(*key, 0.5) for key in keys]
    assert masks == [again.draw(*key, 0.5) for key in reversed(keys)][::-1]
    assert len({mask.names for mask in masks}) == len(keys)
    assert StageMasks(units, seed=6).draw(1, 0, 0, 0.5) != masks[0]


def test_a_mask_knows_its_share_and_whether_it_is_complete():
    masks = StageMasks({0: layers((4, 4), blocks=4)}, seed=0)
    assert masks.draw(1, 0, 0, 0.5).share == 0.5
    assert not masks.draw(1, 0, 0, 0.5).complete
    assert masks.draw(1, 0, 0, 1.0).complete
    assert masks.draw(1, 0, 0, 0.0).names == ()
