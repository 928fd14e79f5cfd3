"""A small byte-level GPT, written as the list of layers that DeepSpeed's pipeline cuts into stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

INIT_STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 256
    context: int = 64
    width: int = 256
    heads: int = 4
    blocks: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


def init_weights(module: nn.Module, seed: int) -> None:
    """Initialise `module` from its own seed, so that the stage or rank that builds it makes no difference."""
    generator = torch.Generator().manual_seed(seed)
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            nn.init.normal_(child.weight, std=INIT_STD, generator=generator)
        if isinstance(child, nn.Linear) and child.bias is not None:
            nn.init.zeros_(child.bias)


class TokenEmbedding(nn.Module):
    def __init__(self, config: GPTConfig, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        init_weights(self, seed)

    @property
    def weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


class PositionEmbedding(nn.Module):
    def __init__(self, config: GPTConfig, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.context, config.width)
        init_weights(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding.weight[: x.size(1)]


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, heads, time, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GPTConfig, seed: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        init_weights(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Output(nn.Module):
    """Logits from a matrix of their own; the tied model uses the token embedding instead."""

    def __init__(self, config: GPTConfig, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(config.width, config.vocab_size, bias=False)
        init_weights(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def tied_output(embedding: TokenEmbedding, x: Tensor) -> Tensor:
    return functional.linear(x, embedding.weight)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy per byte, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def gpt_layers(config: GPTConfig, tied: bool) -> list[LayerSpec]:
    """The model from tokens to logits; `tied` shares the token embedding with the output layer."""
    first, last = config.seed, config.seed + config.blocks + 2
    if tied:
        spec = ("tokens", TokenEmbedding, config, first)
        tokens = TiedLayerSpec(*spec, tied_weight_attr="embedding.weight")
        output = TiedLayerSpec(*spec, forward_fn=tied_output, tied_weight_attr="embedding.weight")
    else:
        tokens = LayerSpec(TokenEmbedding, config, first)
        output = LayerSpec(Output, config, last)
    return [
        tokens,
        LayerSpec(PositionEmbedding, config, first + 1),
        *(LayerSpec(Block, config, first + 2 + index) for index in range(config.blocks)),
        LayerSpec(nn.LayerNorm, config.width),
        output,
    ]


def build_pipeline(
    config: GPTConfig,
    num_stages: int,
    tied: bool = False,
    activation_checkpoint_interval: int = 0,
) -> PipelineModule:
    """Cut the model into stages with equal numbers of blocks; everything else is small beside a block.

    Only blocks are recomputed under activation checkpointing: reentrant checkpointing cannot
    start at the embedding, whose input is integers.
    """
    return PipelineModule(
        layers=gpt_layers(config, tied),
        num_stages=num_stages,
        loss_fn=loss_fn,
        partition_method="type:Block",
        activation_checkpoint_interval=activation_checkpoint_interval,
        checkpointable_layers=["Block"],
    )
