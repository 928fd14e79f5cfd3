"""Layers as users write them, in Megatron-Core's blocks: the host's bits with nothing frozen, else the oracle's."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
import user_layers
from megatron_oracle import FUSED, check_oracle, check_same
from megatron_ranks import Case, innermost, start, train, train_step

pytestmark = pytest.mark.distributed

LAYERS = ["Energy", "Functional", "Watched"]
DEFERRED: dict[str, Any] = {"weight_gradients": "deferred", "extra_microbatches": 1}
TOKENS: dict[str, Any] = {"granularity": "token"}


@pytest.mark.parametrize("section", [{}, DEFERRED, TOKENS], ids=["in place", "deferred", "tokens"])
@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_frozen_is_the_host_to_the_bit(megatron: Any, layer: str, section: dict[str, Any]) -> None:
    case = Case(beside=layer, ratios=0.0, section=section, model=FUSED)
    ours = megatron(2).run(train, case, False)
    check_same(ours, megatron(2).run(train, replace(case, section=None, ratios=None), False))
    assert [rank["status"] for rank in ours] == [None, None]


@pytest.mark.parametrize("section", [{}, DEFERRED], ids=["in place", "deferred"])
@pytest.mark.parametrize("layer", LAYERS)
def test_masks_leave_the_oracles_gradients(megatron: Any, layer: str, section: dict[str, Any]) -> None:
    case = Case(beside=layer, ratios=0.6, section=section)
    check_oracle(case, megatron(2).run(train, case))


def test_layers_that_are_left_to_the_host_are_named_with_the_reason(megatron: Any) -> None:
    case = Case(beside="Energy", ratios=0.0, section=DEFERRED)
    for rank in megatron(2).run(train, case, False):
        assert any(
            "layer.down.weight" in note and "a gradient of its gradient is taken" in note for note in rank["notes"]
        )


def copied(case: Case) -> list[bool]:
    """Whether copies that are made while layers are tapped have their own weights, and layers get their class back.

    Of the user's layer: Megatron's own cannot be copied or saved, with or without us.
    """
    chunks, optimizer, adapter = start(case)
    train_step(case, chunks, optimizer, 0)  # the first step checks, taps are used after it
    layer = next(m for name, m in innermost(chunks[0]).named_modules() if name.endswith("layers.0.mlp.layer"))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    others = copy.deepcopy(layer), torch.load(file, weights_only=False)
    for parameter in (p for other in others for p in other.parameters()):
        parameter.data.zero_()
    train_step(case, chunks, optimizer, 1)
    zeros = [not other(torch.ones(2, user_layers.WIDTH)).any() for other in others]
    adapter.detach()
    return [*zeros, all("_intercepted_class" not in vars(type(m)) for m in chunks[0].modules())]


def test_a_copy_made_after_attaching_has_its_own_weights(megatron: Any) -> None:
    assert megatron(2).run(copied, Case(beside="Plain", ratios=0.0, section=DEFERRED)) == [[True] * 3] * 2
