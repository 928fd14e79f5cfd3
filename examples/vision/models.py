"""A vision transformer and a ConvNeXt-V2-style network, as the lists of layers that DeepSpeed's pipeline cuts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn import functional

POSITION_STD = 0.5  # larger than usual: in a short training, where a patch is must count from the start
BLOCKS = ["TransformerBlock", "ConvNeXtBlock"]  # what activation checkpointing recomputes


@dataclass(frozen=True)
class ViTConfig:
    """`width` is a token's; `depth` counts blocks; `image` and `patch` are edges in pixels."""

    width: int = 192
    depth: int = 8
    heads: int = 4
    patch: int = 8
    image: int = 32
    channels: int = 1
    classes: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        if self.image % self.patch:
            raise ValueError(f"image {self.image} is not a multiple of patch {self.patch}")
        if self.depth < 1:
            raise ValueError(f"depth is {self.depth}: a vision transformer needs at least one block")

    def layers(self) -> list[LayerSpec]:
        return [
            LayerSpec(Tokens, self, self.seed),
            *(LayerSpec(TransformerBlock, self, self.seed + 1 + index) for index in range(self.depth)),
            LayerSpec(TokenHead, self, self.seed + 1 + self.depth),
        ]


@dataclass(frozen=True)
class ConvNeXtConfig:
    """Levels of `depths` blocks. From each to the next the width doubles and height and width of the image halve.

    A block has nearly the same arithmetic in every level, but an early one has large activations and few
    parameters, a late one small activations and many parameters.
    """

    width: int = 32
    depths: tuple[int, ...] = (2, 2, 4, 2)
    kernel: int = 7
    patch: int = 2
    image: int = 32
    channels: int = 1
    classes: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.depths or min(self.depths) < 1:
            raise ValueError(f"depths are {list(self.depths)}: every level needs at least one block")
        shrinks = self.patch * 2 ** (len(self.depths) - 1)
        if self.image % shrinks:
            raise ValueError(f"{len(self.depths)} levels shrink an image by {shrinks}, which does not fit {self.image}")

    def layers(self) -> list[LayerSpec]:
        chain: list[tuple[type[nn.Module], int]] = [(Stem, self.width)]
        for level, depth in enumerate(self.depths):
            width = self.width * 2**level
            if level:
                chain.append((Downsample, width))
            chain.extend([(ConvNeXtBlock, width)] * depth)
        chain.append((PooledHead, width))
        return [LayerSpec(kind, self, width, self.seed + index) for index, (kind, width) in enumerate(chain)]


def init_weights(module: nn.Module, seed: int) -> None:
    """Initialise `module` from its own seed, so that the stage or rank that builds it makes no difference."""
    generator = torch.Generator().manual_seed(seed)
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Conv2d):
            fan_in = child.weight[0].numel()
            nn.init.normal_(child.weight, std=fan_in**-0.5, generator=generator)
            nn.init.zeros_(child.bias)
        if isinstance(child, nn.Embedding):
            nn.init.normal_(child.weight, std=POSITION_STD, generator=generator)


# --- vision transformer: layers pass on (batch, tokens, width) -----------------------------------------------


class Tokens(nn.Module):
    """Cuts images into patches, one token each, behind a class token; adds learned positions."""

    def __init__(self, config: ViTConfig, seed: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Embedding(1 + (config.image // config.patch) ** 2, config.width)
        init_weights(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        return tokens + self.positions.weight


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: ViTConfig, seed: int) -> None:
        super().__init__()
        width = config.width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, config.heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        init_weights(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TokenHead(nn.Module):
    """Logits from the class token."""

    def __init__(self, config: ViTConfig, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.linear = nn.Linear(config.width, config.classes)
        init_weights(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x[:, 0]))


# --- ConvNeXt V2 (Woo et al., 2023): layers pass on (batch, height, width, channels) -------------------------


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution with the channels last, where layer norms and linear layers want them."""
    return conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous()


class GlobalResponseNorm(nn.Module):
    """Weighs each channel by its norm over the whole image, relative to the other channels."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        response = norm / (norm.mean(dim=-1, keepdim=True) + self.eps)
        return x + self.scale * (x * response) + self.shift


class Stem(nn.Module):
    def __init__(self, config: ConvNeXtConfig, width: int, seed: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(config.channels, width, config.patch, stride=config.patch)
        self.norm = nn.LayerNorm(width)
        init_weights(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(convolve(self.conv, images.to(self.conv.weight.dtype).permute(0, 2, 3, 1)))


class Downsample(nn.Module):
    """Half the height and width, `width` channels from half as many."""

    def __init__(self, config: ConvNeXtConfig, width: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width // 2)
        self.conv = nn.Conv2d(width // 2, width, kernel_size=2, stride=2)
        init_weights(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self.conv, self.norm(x))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, layer norm, and an MLP on each pixel with global response normalisation in it."""

    def __init__(self, config: ConvNeXtConfig, width: int, seed: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, config.kernel, padding=config.kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            GlobalResponseNorm(4 * width),
            nn.Linear(4 * width, width),
        )
        init_weights(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(convolve(self.depthwise, x)))


class PooledHead(nn.Module):
    """Logits from the mean over the image."""

    def __init__(self, config: ConvNeXtConfig, width: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, config.classes)
        init_weights(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.mean(dim=(1, 2))))


# --- what both are trained and judged by ---------------------------------------------------------------------


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy per image, in nats."""
    return functional.cross_entropy(logits.float(), labels)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the images that got the right label."""
    return (logits.argmax(dim=-1) == labels).float().mean()
