from math import prod

import numpy as np
import pytest

from tf_adapters.masks import StageMasks
from tf_adapters.selection.uniform import UniformSelection
from tf_adapters.units import FreezeUnit, frozen_share


def layers(*shapes, blocks):
    return [
        FreezeUnit((f"{block}.{position}",), float(prod(shape)), shape)
        for block in range(blocks)
        for position, shape in enumerate(shapes)
    ]


GPT = [(192, 64), (192,), (64, 64), (64,), (256, 64), (256,), (64, 256), (64,), (64,), (64,), (64,), (64,)]
LLAMA = [(64, 64), (16, 64), (16, 64), (64, 64), (224, 64), (224, 64), (64, 224), (64,), (64,)]
MODELS = {
    "gpt": layers(*GPT, blocks=8),
    "llama": layers(*LLAMA, blocks=8),
    "embedding": [FreezeUnit(("embedding",), 300.0 * 64, (300, 64)), *layers(*GPT, blocks=3)],
    "two tensors": layers((8, 8), (8,), blocks=1),
    "one tensor": layers((8, 8), blocks=1),
}
DRAWS = 4000


def draws(units, ratio, count=DRAWS):
    selection = UniformSelection(units)
    return [selection.draw(ratio, np.random.default_rng([3, draw])) for draw in range(count)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ratio", [0.05, 0.37, 0.8, 0.95])
def test_every_unit_has_the_same_chance_and_the_work_is_exact_in_expectation(model, ratio):
    units = MODELS[model]
    drawn = draws(units, ratio)
    counts = np.bincount([index for frozen in drawn for index in frozen], minlength=len(units))
    noise = np.sqrt(ratio * (1 - ratio) / DRAWS)
    assert np.abs(counts / DRAWS - ratio).max() < 4.5 * noise
    # Units of one draw are correlated only towards the planned work, so its mean is no noisier than a coin's.
    assert abs(np.mean([frozen_share(units, f) for f in drawn]) - ratio) < 4.5 * noise


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
