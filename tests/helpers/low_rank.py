"""Partly frozen models for the tests of several hosts: base weights that do not train, low-rank adapters that do."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from rank_pools import seed
from torch import nn

RANK = 3


class LowRankLinear(nn.Module):
    """A linear layer as it was, frozen, plus a trainable product of two thin matrices (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, base.out_features, bias=False)  # not zeros: lora_a is to have gradients at once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def freeze_all_but_adapters(layers: Iterable[tuple[str, nn.Module]], adapted: Container[int]) -> None:
    """Freeze layers, by number, and give the linear layers inside those that are ``adapted`` adapters."""
    for name, layer in layers:
        layer.requires_grad_(False)
        seed(int(name))
        for child_name, child in list(layer.named_children()) if int(name) in adapted else []:
            if isinstance(child, nn.Linear):
                setattr(layer, child_name, LowRankLinear(child))


def masked_names(rank: Mapping[str, Any]) -> set[str]:
    """Everything that any mask of a rank's recorded steps names."""
    return {name for step in rank["steps"] for names in step["masks"].values() for name in names}
