"""Checks of what every rank of a run returns, for DeepSpeed, Megatron-Core and torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def assert_same(actual: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Assert that ranks of two runs had the same losses and ended with the same parameters."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert [s["loss"] for s in ours["steps"]] == [s["loss"] for s in theirs["steps"]]
        for name, value in theirs["parameters"].items():
            assert torch.equal(ours["parameters"][name], value), name


def assert_tokens_drawn(ranks: Sequence[dict[str, Any]]) -> None:
    """Assert that every rank drew tokens and masked no parameter."""
    for rank in ranks:
        assert any(rank["draws"].values())
        assert rank["status"] is None
        assert not any(names for step in rank["steps"] for names in step["masks"].values())
