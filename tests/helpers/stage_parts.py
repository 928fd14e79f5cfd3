"""Parts of random pipeline stages: layers as people write them, each ``[rows, WIDTH]`` to ``[rows, WIDTH]``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from rank_pools import seed
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

WIDTH, ROWS, VOCABULARY = 8, 6, 16
Tensor = torch.Tensor


class Part(nn.Module):
    """One part, built from a number: the same again wherever it stands.

    ``takes`` parts inside it. ``repeats`` is false where a checkpoint, which computes twice, would change what it does.
    ``ways`` are variants of it. If it may be hostile from a ``later`` step on, it ``begins`` in that step.
    ``no_oracle`` says why masked gradients cannot be compared with those of one process.
    """

    takes = 0
    repeats = True
    ways: tuple[str, ...] = ("",)
    later = False
    no_oracle = ""

    def __init__(self, number: int, inside: tuple[nn.Module, ...] = (), way: str = "", begins: int = 0) -> None:
        super().__init__()
        seed(number)
        self.inside = nn.ModuleList(inside)
        self.seen: list[Tensor] = []  # what the user's hooks have seen in this step
        self.way, self.begins, self.step = way, begins, 0
        self.build(random.Random(number))

    @property
    def hostile(self) -> bool:
        """Whether it has begun."""
        return self.step >= self.begins

    def term(self, loss: Tensor, output: Tensor) -> Tensor:
        """Return the loss of a microbatch, from that before it and the model's output. Called on the last stage."""
        return loss

    def end(self) -> None:
        """The optimizer has updated the weights."""

    def build(self, draw: random.Random) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7)


PARTS: dict[str, type[Part]] = {}


def part(kind: type[Part]) -> type[Part]:
    PARTS[kind.__name__] = kind
    return kind


def leaf(run: Callable[[Any, Tensor], Tensor]) -> type[Part]:
    """A part of one linear layer, ``self.layer``, that a function uses."""
    name = "".join(word.capitalize() for word in run.__name__.split("_"))
    place = {"__module__": run.__module__, "__qualname__": run.__name__}  # where pickle finds it
    return part(type(name, (Part,), {"forward": run, **place}))


def of(make: Callable[[random.Random], nn.Module]) -> Callable[[Any], type[Part]]:
    """As ``leaf``, with a layer that ``make`` makes."""

    def decorated(run: Callable[[Any, Tensor], Tensor]) -> type[Part]:
        kind = leaf(run)
        kind.build = lambda self, draw: setattr(self, "layer", make(draw))  # type: ignore[method-assign]
        return kind

    return decorated


# --- plain layers --------------------------------------------------------------------------------------------------


@leaf
def linear(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)


@of(lambda draw: nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)))
def perceptron(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)


@of(lambda draw: nn.LayerNorm(WIDTH))
def norm(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)


@of(lambda draw: nn.Conv1d(1, 1, 3, padding=1))
def convolution(self: Any, x: Tensor) -> Tensor:
    return self.layer(x.unsqueeze(1)).squeeze(1)


@of(lambda draw: nn.Embedding(4, WIDTH))
def looked_up(self: Any, x: Tensor) -> Tensor:
    return x + self.layer((x.detach()[:, 0] > 0).long())


@of(lambda draw: nn.Bilinear(WIDTH, WIDTH, WIDTH))
def bilinear(self: Any, x: Tensor) -> Tensor:
    return self.layer(x, torch.tanh(x))


@of(lambda draw: nn.MultiheadAttention(WIDTH, 2, batch_first=True))
def attention(self: Any, x: Tensor) -> Tensor:
    return self.layer(x[None], x[None], x[None])[0][0]


@of(lambda draw: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.1, batch_first=True))
def encoder(self: Any, x: Tensor) -> Tensor:
    return self.layer(x[None])[0]


@of(lambda draw: nn.GRUCell(WIDTH, WIDTH))
def recurrent(self: Any, x: Tensor) -> Tensor:
    return self.layer(x, self.layer(x))


@of(lambda draw: nn.Dropout(0.2))
def dropout(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)


@part
class BatchNorm(Part):
    repeats = False

    def build(self, draw: random.Random) -> None:
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.layer(x))


@part
class Settle(Part):
    def build(self, draw: random.Random) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,))


# --- a layer that is used in another way ---------------------------------------------------------------------------


@leaf
def twice(self: Any, x: Tensor) -> Tensor:
    return self.layer(torch.tanh(self.layer(x)))


@leaf
def one_weight_of_a_child(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.layer.weight, self.layer.bias)


@leaf
def called_and_by_its_weight(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(self.layer(x)) @ self.layer.weight


@leaf
def weight_decay(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) + self.layer.weight.square().mean()


@leaf
def weight_data(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) + x @ self.layer.weight.data.t()


@leaf
def forward_itself(self: Any, x: Tensor) -> Tensor:
    return self.layer.forward(x)


@leaf
def by_keyword(self: Any, x: Tensor) -> Tensor:
    return self.layer(input=x)


@leaf
def one_row(self: Any, x: Tensor) -> Tensor:
    return x + self.layer(x[0])


@leaf
def three_dimensions(self: Any, x: Tensor) -> Tensor:
    return self.layer(x.view(2, ROWS // 2, WIDTH).transpose(0, 1)).transpose(0, 1).reshape(ROWS, WIDTH)


@leaf
def no_rows(self: Any, x: Tensor) -> Tensor:
    return x + self.layer(x[:0]).sum()


@leaf
def expanded(self: Any, x: Tensor) -> Tensor:
    return x + self.layer(x).mean(0, keepdim=True).expand(ROWS, WIDTH)


@leaf
def some_rows(self: Any, x: Tensor) -> Tensor:
    return x.index_add(0, torch.arange(3), self.layer(x[:3]))


@leaf
def unused_output(self: Any, x: Tensor) -> Tensor:
    self.layer(x)
    return x * 0.9


@leaf
def unused_layer(self: Any, x: Tensor) -> Tensor:
    return x * 0.9


@leaf
def half_used(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    return x + y * y.detach()


@leaf
def toggled(self: Any, x: Tensor) -> Tensor:
    """Frozen by the user while it is used, as a discriminator is."""
    trained = [p for p in self.layer.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        return x + self.layer(x)
    finally:  # a checkpoint leaves a recomputation by an exception, once it has what it needs
        for p in trained:
            p.requires_grad_(True)


@of(lambda draw: nn.Linear(WIDTH, 2 * WIDTH))
def gated(self: Any, x: Tensor) -> Tensor:
    a, b = self.layer(x).chunk(2, -1)
    return a * torch.sigmoid(b)


@part
class FrozenWeight(Part):
    def build(self, draw: random.Random) -> None:
        super().build(draw)
        (self.layer.weight if self.layer.bias is None or draw.random() < 0.7 else self.layer.bias).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@part
class Tied(Part):
    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.layer(x)))


class MatMul(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(torch.tanh(input))


@of(lambda draw: MatMul())
def own_product(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)


@of(lambda draw: OwnLinear(WIDTH, WIDTH))
def subclass(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)


@part
class Table(Part):
    def build(self, draw: random.Random) -> None:
        self.table = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table * 1.0


@of(lambda draw: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))
def weight_norm(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)


@of(lambda draw: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
def spectral_norm(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)


PARTS["SpectralNorm"].repeats = False


# --- other types ---------------------------------------------------------------------------------------------------


@of(lambda draw: nn.Linear(WIDTH // 2 + 1, WIDTH // 2 + 1, dtype=torch.complex64))
def complex_numbers(self: Any, x: Tensor) -> Tensor:
    return torch.fft.irfft(self.layer(torch.fft.rfft(x)), n=WIDTH)


@of(lambda draw: nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
def double(self: Any, x: Tensor) -> Tensor:
    return self.layer(x.double()).float()


@of(lambda draw: nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))
def half(self: Any, x: Tensor) -> Tensor:
    return self.layer(x.bfloat16()).float()


@leaf
def autocast_output(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.layer(x)
    return x + y.float()
