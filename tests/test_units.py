"""Units of selection: what is left of them once some are excluded."""

from __future__ import annotations

import pytest

from tf_adapters.errors import ConfigError
from tf_adapters.masks import StageMasks
from tf_adapters.units import FreezeUnit, without

UNITS = {
    0: [FreezeUnit(("embed.weight",), 8.0, (8,)), FreezeUnit(("0.linear.weight", "0.linear.bias"), 4.0, (4,))],
    1: [FreezeUnit(("1.linear.weight",), 4.0, (4,)), FreezeUnit(("1.norm.weight",), 1.0, (1,))],
}


def names(patterns: list[str]) -> list[str]:
    return [name for of_stage in without(UNITS, patterns).values() for unit in of_stage for name in unit.names]


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
        without(UNITS, ["*.weight", "embbed*"])
    assert str(caught.value) == ('timely_freeze.freeze_exclude: "embbed*" matches no parameter such as "embed.weight"')


def test_shares_are_of_what_can_be_frozen_and_a_stage_with_exclusions_is_never_frozen_whole():
    masks = StageMasks(UNITS, seed=0, exclude=["embed*"])
    everything = masks.draw(1, 0, 0, 1.0)
    assert everything.names == ("0.linear.weight", "0.linear.bias")
    assert everything.share == 1.0
    assert not everything.complete
    assert masks.draw(1, 1, 0, 1.0).complete
    assert [masks.can_freeze_all(stage) for stage in (0, 1)] == [False, True]


def test_a_stage_with_nothing_left_freezes_nothing():
    mask = StageMasks(UNITS, seed=0, exclude=["1.*"]).draw(1, 1, 0, 1.0)
    assert (mask.names, mask.share, mask.complete) == ((), 0.0, False)
