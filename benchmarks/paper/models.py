"""The paper's models as layers with their real shares of the FLOPs, and tiny layers that compute in these shares.

Counted are products with weights, a multiply-add as two FLOPs, and attention's products of activations. Norms,
activation functions and the loss are left out, as in ``tf_adapters.simulate.model_costs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from tf_adapters.simulate.model_costs import LLAMA_1B, LLAMA_8B, LLAMA_13B, LlamaShape, split_layers
from tf_adapters.training.phases import PhaseSchedule

WIDTH, POSITIONS, HIDDEN, VOCABULARY = 32, 8, 120, 64
"""Sizes of the tiny layers: a microbatch has ``POSITIONS`` rows; the largest block has ``HIDDEN`` units in all."""

LENGTH = 1024  # tokens of a sequence, in the paper
CAUSAL = 0.5  # share of the scores that a causal kernel computes
PARTITIONS = ("memory", "parameter", "time")


@dataclass(frozen=True)
class Layer:
    """A layer of a real model. FLOPs are of a forward and of one sample; bytes are of one sample's activations.

    ``products``: FLOPs of the products with weights, one for each pair of matrices (attention's, the MLP's).
    """

    kind: str  # "tokens", "patches", "block" or "head"
    products: tuple[float, ...] = ()
    attention: float = 0.0
    parameters: float = 0.0
    activation_bytes: float = 0.0

    @property
    def forward(self) -> float:
        return sum(self.products) + self.attention


@dataclass(frozen=True)
class Model:
    """A model as the paper trained it: its phases end at T_w, T_m, T_f, in steps."""

    name: str
    layers: tuple[Layer, ...]
    phases: PhaseSchedule
    steps: int
    max_freeze_ratio: float = 0.8
    samples: int = 1  # of a microbatch

    def boundaries(self, stages: int, partition: str = "", in_flight: Sequence[int] = ()) -> list[int]:
        """Where the stages begin, and the number of layers.

        Blocks are split as TorchTitan does: first and last layer count as a block each. ``partition`` is one of the
        paper's heuristics instead, where the largest stage is the least possible; ``in_flight`` says how many
        microbatches' activations each stage keeps.
        """
        if not partition:
            blocks = split_layers(len(self.layers) - 2, stages)
            return [0, *(1 + end for end in accumulate(blocks[:-1])), len(self.layers)]
        costs = [
            {
                "parameter": [layer.parameters for layer in self.layers],
                "time": [layer.forward for layer in self.layers],
                "memory": [
                    16.0 * layer.parameters + held * self.samples * layer.activation_bytes for layer in self.layers
                ],
            }[partition]
            for held in in_flight
        ]
        return _split(costs)


def _split(costs: Sequence[Sequence[float]]) -> list[int]:
    """The boundaries of contiguous stages whose largest cost is least; ``costs[stage][layer]``."""
    layers = len(costs[0])
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for of_stage in costs:
        best = {
            stop: min(
                (max(largest, sum(of_stage[start:stop])), (*cut, stop))
                for start, (largest, cut) in best.items()
                if start < stop
            )
            for stop in range(min(best) + 1, layers + 1)
        }
    return list(best[layers][1])


def _llama(shape: LlamaShape) -> tuple[Layer, ...]:
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    block = Layer(
        "block",
        products=(2.0 * LENGTH * (shape.layer_weights - mlp), 2.0 * LENGTH * mlp),
        attention=4.0 * LENGTH * LENGTH * shape.hidden_size * CAUSAL,
    )
    head = Layer("head", products=(2.0 * LENGTH * shape.embedding_weights,))
    return Layer("tokens"), *[block] * shape.num_hidden_layers, head


def _vit() -> tuple[Layer, ...]:
    """ViT-L/32 (Dosovitskiy et al., 2021): 24 blocks of width 1,024; 224 x 224 pixels are 49 patches and a class."""
    width, tokens, classes = 1024, 50, 1000
    block = Layer(
        "block",
        products=(2.0 * tokens * 4 * width**2, 2.0 * tokens * 8 * width**2),
        attention=4.0 * tokens**2 * width,
    )
    patches = Layer("patches", products=(2.0 * (tokens - 1) * 32 * 32 * 3 * width,))
    return patches, *[block] * 24, Layer("head", products=(2.0 * width * classes,))


def _convnext() -> tuple[Layer, ...]:
    """ConvNeXt-V2-L (Woo et al., 2023): levels of 3, 3, 27, 3 blocks, 192 channels on 56 x 56 pixels in the first.

    A block's depthwise convolution is counted with its products on pixels. For the backward it saves 15 values of 4
    bytes for each pixel and channel: input, convolution, norm, and three times 4 in the MLP.
    """
    layers = [Layer("patches", (2.0 * 56**2 * 48 * 192,), 0.0, 48 * 192, 4.0 * 56**2 * 192)]
    for level, depth in enumerate((3, 3, 27, 3)):
        channels, pixels = 192 * 2**level, (56 // 2**level) ** 2
        kept = 4.0 * pixels * channels
        if level:
            weights = 4 * (channels // 2) * channels
            layers.append(Layer("block", (2.0 * pixels * weights,), 0.0, weights, kept))
        weights = 8 * channels**2 + 49 * channels
        layers += [Layer("block", (2.0 * pixels * weights,), 0.0, weights, 15 * kept)] * depth
    return *layers, Layer("head", (2.0 * 1536 * 101,), 0.0, 1536 * 101, 4.0 * 1536)


MODELS = {
    "1B": Model("LLaMA-3.2-1B", _llama(LLAMA_1B), PhaseSchedule(60, 100, 200), 800),
    "8B": Model("LLaMA-3-8B", _llama(LLAMA_8B), PhaseSchedule(160, 200, 250), 2000),
    "13B": Model("LLaMA-2-13B", _llama(LLAMA_13B), PhaseSchedule(150, 200, 250), 2000),
    "ViT": Model("ViT-L/32", _vit(), PhaseSchedule(1400, 1600, 2400), 17500),
    "ConvNeXt": Model("ConvNeXt-V2-L", _convnext(), PhaseSchedule(2350, 2850, 5600), 20000, 0.5, samples=8),
}


# --- tiny layers with the same shares: (positions, width), with as few operations as can be ---------------------


class Block(nn.Module):
    """Pairs of matrices, each with a residual connection; the first one behind scores over some positions."""

    def __init__(self, hidden: Sequence[int], keys: int) -> None:
        super().__init__()
        self.keys = keys
        self.up = nn.ParameterList([0.05 * torch.randn(WIDTH, units) for units in hidden])
        self.down = nn.ParameterList([0.05 * torch.randn(units, WIDTH) for units in hidden])

    def forward(self, x: Tensor) -> Tensor:
        if self.keys:
            seen = x[: self.keys]
            x = torch.addmm(x, x @ seen.T, seen, alpha=1e-3)
        for up, down in zip(self.up, self.down, strict=True):
            x = torch.addmm(x, x @ up, down)
        return x


def build(model: Model, first: int, last: int) -> list[nn.Module]:
    """Tiny layers for ``model.layers[first:last]``; the weights depend on the layer's place only."""
    largest = max(sum(layer.products) for layer in model.layers if layer.kind == "block")
    return [_build(layer, HIDDEN / largest, first + place) for place, layer in enumerate(model.layers[first:last])]


def _build(layer: Layer, scale: float, place: int) -> nn.Module:
    torch.manual_seed(place)
    if layer.kind == "tokens":
        return nn.Embedding(VOCABULARY, WIDTH)
    units = [max(1, round(scale * flops)) for flops in layer.products]
    if layer.kind == "block":
        return Block(units, min(POSITIONS, round(scale * layer.attention)))
    one_matrix = max(2, round(2 * scale * sum(layer.products)))  # a pair has twice the FLOPs for each unit
    return nn.Linear(one_matrix, WIDTH, bias=False) if layer.kind == "patches" else nn.Linear(WIDTH, one_matrix, False)


def forward_flops(model: Model) -> float:
    """FLOPs of a forward of one microbatch through the tiny layers, without attention's."""
    weights = (p for layer in build(model, 1, len(model.layers)) for p in layer.parameters())
    first = 0 if model.layers[0].kind == "tokens" else build(model, 0, 1)[0].weight.numel()
    return 2.0 * POSITIONS * (first + sum(p.numel() for p in weights))


def microbatch(model: Model, number: int) -> tuple[Tensor, Tensor]:
    """Inputs of (``POSITIONS``,) or (``POSITIONS``, features), and labels of (``POSITIONS``,)."""
    generator = torch.Generator().manual_seed(number)
    (entrance,), (head,) = build(model, 0, 1), build(model, len(model.layers) - 1, len(model.layers))
    labels = torch.randint(head.weight.shape[0], (POSITIONS,), generator=generator)
    if model.layers[0].kind == "tokens":
        return torch.randint(VOCABULARY, (POSITIONS,), generator=generator), labels
    return torch.randn(POSITIONS, entrance.weight.shape[1], generator=generator), labels
