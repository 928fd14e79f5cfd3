"""Units of selection: what is left of them once some are excluded, and how often some may be frozen."""

from __future__ import annotations

import pytest

from tf_adapters.errors import ConfigError
from tf_adapters.selection.freeze_units import FreezeUnit, limited
from tf_adapters.selection.masks import Mask, StageMasks

UNITS = {
    0: [FreezeUnit(("embed.weight",), 8.0, (8,)), FreezeUnit(("0.linear.weight", "0.linear.bias"), 4.0, (4,))],
    1: [FreezeUnit(("1.linear.weight",), 4.0, (4,)), FreezeUnit(("1.norm.weight",), 1.0, (1,))],
}


def names(patterns: list[str]) -> list[str]:
    return [name for of_stage in limited(UNITS, patterns, {}).values() for unit in of_stage for name in unit.names]


def caps(limits: dict[str, float], exclude: tuple[str, ...] = ()) -> dict[str, float]:
    return {unit.names[0]: unit.cap for of_stage in limited(UNITS, exclude, limits).values() for unit in of_stage}


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ([], ["embed.weight", "0.linear.weight", "0.linear.bias", "1.linear.weight", "1.norm.weight"]),
        (["embed*"], ["0.linear.weight", "0.linear.bias", "1.linear.weight", "1.norm.weight"]),
        (["*.bias", "?.norm.*"], ["embed.weight", "1.linear.weight"]),
        (["[01].linear.weight"], ["embed.weight", "1.norm.weight"]),
        (["*"], []),
    ],
)
def test_what_a_pattern_matches_is_no_unit(patterns, left):
    assert names(patterns) == left


def test_a_pattern_that_matches_nothing_is_one_clear_line():
    with pytest.raises(ConfigError) as caught:
        limited(UNITS, ["*.weight", "embbed*"], {})
    assert str(caught.value) == (
        'timely_freeze.freeze_exclude: "embbed*" matches no trainable parameter such as "embed.weight"'
    )
    with pytest.raises(ConfigError) as caught:
        limited(UNITS, [], {"*.weight": 0.5, "*.lora_A": 0.5})
    assert str(caught.value) == (
        'timely_freeze.freeze_limits: "*.lora_A" matches no trainable parameter such as "embed.weight"'
    )
    with pytest.raises(ConfigError, match="matches no trainable parameter since nothing trains"):
        limited({0: [], 1: []}, ["*"], {})


def test_a_unit_has_the_smallest_cap_of_the_patterns_that_match_any_of_its_names():
    everything = {"embed.weight": 1.0, "0.linear.weight": 1.0, "1.linear.weight": 1.0, "1.norm.weight": 1.0}
    assert caps({}) == everything
    assert caps({"embed*": 0.25}) == {**everything, "embed.weight": 0.25}
    assert caps({"*.linear.*": 0.5, "0.*.bias": 0.3}) == {**everything, "0.linear.weight": 0.3, "1.linear.weight": 0.5}
    assert caps({"0.*.bias": 0.3, "*.linear.*": 0.5}) == caps({"*.linear.*": 0.5, "0.*.bias": 0.3})
    assert caps({"*": 1.0}) == everything


def test_a_cap_of_zero_excludes():
    assert limited(UNITS, [], {"embed*": 0.0}) == limited(UNITS, ["embed*"], {})
    assert caps({"embed*": 0.5}, exclude=("embed*",)) == caps({}, exclude=("embed*",))
    masks = StageMasks(UNITS, seed=0, caps={"embed*": 0.0})
    assert not masks.draw(1, 0, [1.0])[0].complete
    assert [masks.can_freeze_all(stage) for stage in (0, 1)] == [False, True]


def test_shares_are_of_what_can_be_frozen_and_a_stage_with_exclusions_is_never_frozen_whole():
    masks = StageMasks(UNITS, seed=0, exclude=["embed*"])
    everything = masks.draw(1, 0, [1.0])[0]
    assert everything.names == ("0.linear.weight", "0.linear.bias")
    assert everything.share == 1.0
    assert not everything.complete
    assert masks.draw(1, 1, [1.0])[0].complete
    assert [masks.can_freeze_all(stage) for stage in (0, 1)] == [False, True]


def test_on_a_stage_that_trains_nothing_every_mask_is_empty_and_complete():
    masks = StageMasks({**UNITS, 2: []}, seed=0)
    for ratio in (0.0, 0.5, 1.0):
        assert masks.draw(1, 2, [ratio])[0] == Mask((), 0.0, complete=True)
    assert masks.can_freeze_all(2)
    assert masks.first_training_stage == 0
    assert StageMasks({0: [], 1: [], 2: UNITS[0]}, seed=0).first_training_stage == 2
    assert StageMasks({0: [], 1: UNITS[1], 2: UNITS[0]}, seed=0, exclude=["1.*"]).first_training_stage == 1
    assert StageMasks({0: []}, seed=0).first_training_stage is None
    assert not masks.draw(1, 0, [0.0])[0].complete


def test_a_stage_with_nothing_left_freezes_nothing():
    mask = StageMasks(UNITS, seed=0, exclude=["1.*"]).draw(1, 1, [1.0])[0]
    assert (mask.names, mask.share, mask.complete) == ((), 0.0, False)


def test_a_stage_with_a_limit_is_not_frozen_whole_for_certain_but_a_mask_says_where_it_is():
    masks = StageMasks(UNITS, seed=0, caps={"*norm*": 0.5})
    assert [masks.can_freeze_all(stage) for stage in (0, 1)] == [True, False]
    assert [masks.excludes[stage] for stage in (0, 1)] == [False, False]
    drawn = [masks.draw(step, 1, [1.0])[0] for step in range(40)]
    assert {mask.complete for mask in drawn} == {True, False}
    assert all(mask.complete == (len(mask.names) == 2) for mask in drawn)
    assert {round(mask.share, 6) for mask in drawn} == {round(4 / 4.5, 6), round(5 / 4.5, 6)}


def test_shares_are_of_the_work_that_a_ratio_of_one_freezes_on_average():
    masks = StageMasks(UNITS, seed=0, caps={"embed*": 0.25})
    assert masks.share(0, frozenset({0})) == 2 / 6
    assert masks.share(0, frozenset({1})) == 4 / 6
    assert masks.share(0, frozenset({0, 1})) == 1.0
    shares = [masks.draw(step, 0, [0.5])[0].share for step in range(4000)]
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.05)
