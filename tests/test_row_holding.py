"""Rows that all masks of a step freeze."""

from __future__ import annotations

import torch

from tf_adapters.masking.held_rows import HeldRows, Kept, frozen_by_all, updated_with
from tf_adapters.selection.masks import Mask
from tf_adapters.selection.rows import FrozenRows


def part(name: str, first: int, count: int) -> FrozenRows:
    return FrozenRows((name,), first, count, 10)


def test_rows_that_every_mask_freezes() -> None:
    masks = [
        Mask(("a", "c"), rows=(part("b", 8, 6), part("d", 0, 5))),
        Mask(("c",), rows=(part("a", 2, 3), part("b", 3, 6))),
        Mask(("a", "b", "c"), rows=(part("d", 5, 5),)),
    ]
    # b: 8, 9, 0, 1, 2, 3 and 3 to 8; c is held whole; d has no row in common, and the second mask trains all of it.
    assert frozen_by_all(masks) == {"a": ((2, 5),), "b": ((3, 4), (8, 9))}
    assert frozen_by_all(masks[:1]) == {"b": ((0, 4), (8, 10)), "d": ((0, 5),)}
    assert frozen_by_all([*masks, Mask()]) == {}


def test_elements_of_rows_in_a_shard() -> None:
    held = HeldRows(torch.nn.Parameter(torch.zeros(10, 3)), ((0, 2), (8, 10)))
    flat = torch.arange(30)
    assert torch.cat(held.of(flat.view(10, 3))).tolist() == [*range(6), *range(24, 30)]
    assert torch.cat(held.of(flat[4:26], 4)).tolist() == [4, 5, 24, 25]
    assert held.of(flat[7:20], 7) == []


def test_what_is_kept_comes_back_with_its_state() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        kept = Kept()
        before = [tensor.clone() for tensor in updated_with(optimizer, weight)]
        for tensor in updated_with(optimizer, weight):
            kept.keep(HeldRows(weight, ((1, 3),)).of(tensor))
        optimizer.step()
        kept.put_back()
    after = updated_with(optimizer, weight)
    assert len(before) == len(after) == 3
    for then, now in zip(before, after, strict=True):
        assert torch.equal(then[1:3], now[1:3])
        assert (then[[0, 3]] != now[[0, 3]]).all()
