"""The networks of the language model study: small byte-level transformers, cut into the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

STAGES = 4


@dataclass(frozen=True)
class Shape:
    """Shape of a network. Layers divide by the number of stages; ``context`` is in bytes."""

    layers: int
    width: int
    heads: int = 4
    context: int = 48


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Stage(nn.Module):
    def __init__(self, index: int, shape: Shape) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == STAGES - 1
        if self.first:
            self.tokens, self.places = nn.Embedding(256, shape.width), nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers // STAGES)))
        if self.last:
            self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tokens(x) + self.places.weight
        x = self.blocks(x)
        return self.head(self.norm(x)) if self.last else x


def stages(shape: Shape, seed: int) -> list[Stage]:
    """The whole network; the same weights for the same seed."""
    torch.manual_seed(seed)
    return [Stage(index, shape) for index in range(STAGES)]
