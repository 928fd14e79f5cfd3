"""Layers as users write them: they differentiate inside their forward, branch, call torch.func, look at activations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from rank_pools import finish, fork_ranks, prepare
from torch import nn

from tf_adapters.testing import RankPool, transformer_engine_on_cpu

WIDTH = 8
Pair = tuple[torch.Tensor, torch.Tensor]


class Energy(nn.Module):
    """Passes on an energy's features and a force, the energy's gradient by the layer's own input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            features = self.down(torch.tanh(self.up(point)))
            (force,) = torch.autograd.grad(features.square().sum(), point, create_graph=True)
        return features + 0.1 * force


class Spectral(nn.Module):
    """A complex product between two Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH // 2 + 1, WIDTH // 2 + 1, bias=False, dtype=torch.cfloat)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.fft.irfft(self.mix(torch.fft.rfft(x)), n=WIDTH))


class Functional(nn.Module):
    """Calls of ``torch.func``: a computed weight, a map over samples, a directional derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.made = nn.Linear(3, WIDTH * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mapped, self.sloped = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.made.weight + 0.01 * self.maker(torch.ones(3)).view(WIDTH, WIDTH)
        x = torch.func.functional_call(self.made, {"weight": weight}, (x,))
        x = torch.func.vmap(self.mapped)(x)
        value, slope = torch.func.jvp(lambda t: torch.tanh(self.sloped(t)), (x,), (torch.ones_like(x),))
        return value + 0.1 * slope


class Product(nn.Module):
    """A layer of a type that no tap knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Watched(nn.Module):
    """Looks at its activations, as loggers of gradients do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if torch.is_grad_enabled():
            hidden.register_hook(lambda gradient: self.norms.append(float(gradient.norm())))
            hidden.retain_grad()
        return self.second(hidden)


class Lookup(nn.Module):
    """A first layer whose input has no gradient: tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        if torch.is_grad_enabled():
            hidden.register_hook(lambda gradient: None)
        return hidden


class Fork(nn.Module):
    """Tokens to two streams, each by a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Embedding(16, WIDTH), nn.Embedding(16, WIDTH)

    def forward(self, tokens: torch.Tensor) -> Pair:
        return self.text(tokens), self.image(tokens)


class Learned(nn.Module):
    """Passes on a bias that is made from a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.mix = nn.Parameter(torch.randn(2, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair) -> Pair:
        return self.mix(pair[0]) + pair[1], self.bias * 1.0


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair) -> Pair:
        return pair[0] + torch.tanh(self.left(pair[1])), pair[1] + torch.tanh(self.right(pair[0]))


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair) -> torch.Tensor:
        return self.out(pair[0] * pair[1])


class Engine(nn.Module):
    """A layer of Transformer Engine."""

    kind = "Linear"
    sizes: tuple[int, ...] = (WIDTH, WIDTH)
    bias = True

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.layer = getattr(te, self.kind)(*self.sizes, bias=self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class EngineWithoutBias(Engine):
    bias = False


class EngineNormLinear(Engine):
    kind = "LayerNormLinear"


class EngineNormMLP(Engine):
    kind, sizes = "LayerNormMLP", (WIDTH, 2 * WIDTH)


class EngineGrouped(Engine):
    """Each expert takes one row."""

    kind, sizes = "GroupedLinear", (2, WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x, [1, 1]))


LAYERS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Energy, Plain, Product, Spectral, Functional, Watched, Lookup, Fork, Learned, Cross, Join),
        *(Engine, EngineWithoutBias, EngineNormLinear, EngineNormMLP, EngineGrouped),
    )
}
MODELS: dict[str, tuple[str, ...]] = {
    "energies": ("Energy", "Energy"),
    "complex": ("Spectral", "Spectral"),
    "torch.func": ("Functional", "Functional"),
    "hooks on activations": ("Lookup", "Watched", "Watched", "Watched"),
    "branches": ("Fork", "Cross", "Cross", "Join"),
    "a branch of a parameter alone": ("Fork", "Learned", "Cross", "Join"),
    "no taps": ("Product", "Product", "Product", "Product"),
    "no taps on a stage": ("Plain", "Plain", "Product", "Product"),
}
"""The layers of a pipeline of two stages, by what is special about it."""
ENGINE_MODELS = {
    "Transformer Engine": ("EngineNormLinear", "Engine", "EngineNormMLP", "EngineWithoutBias"),
    "Transformer Engine, experts": ("Engine", "EngineGrouped", "EngineGrouped", "Engine"),
}


def layer_kinds(name: str) -> tuple[str, ...]:
    return MODELS.get(name) or ENGINE_MODELS[name]


def takes_tokens(name: str) -> bool:
    return layer_kinds(name)[0] in ("Lookup", "Fork")


def samples(name: str, step: int, microbatches: int) -> list[Pair]:
    """The microbatches of a step, two rows each: a pure function of its arguments."""
    generator = torch.Generator().manual_seed(step)
    batch = []
    for _ in range(microbatches):
        target = torch.randn(2, WIDTH, generator=generator)
        tokens = torch.randint(16, (2,), generator=generator)
        batch.append((tokens if takes_tokens(name) else torch.randn(2, WIDTH, generator=generator), target))
    return batch


def engine_ranks(host: str) -> RankPool:
    """Two ranks of a host with Transformer Engine; skips the test where there is none."""
    if not transformer_engine_on_cpu.available():
        pytest.skip("no Transformer Engine here: make puts it into a folder of its own")
    return fork_ranks(2, partial(_prepare_engine, host), partial(finish, host))


def _prepare_engine(host: str) -> None:
    transformer_engine_on_cpu.install()
    prepare(host)


def check_nothing_is_promised(name: str, ranks: list[dict[str, Any]]) -> None:
    """Plan, report and log of a run of a model without taps, on both or on one of its stages."""
    without = (0, 1) if name == "no taps" else (1,)
    for rank in ranks:
        plan = rank["plan"]
        assert rank["failure"] is None
        assert all(plan.stage_freeze_ratio[stage] == 0.0 for stage in without)
        said = {
            note[:7] for note in rank["notes"] if "only 0% of the weight-gradient work" in note and "Product" in note
        }
        assert said == {f"stage {stage}" for stage in without}
    assert all(share == 0.0 for share in plan.deferrable_share.values()) or name != "no taps"
