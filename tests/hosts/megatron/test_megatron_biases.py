"""Megatron's compiled functions under masks, with the compiler on: how often it compiles, and what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.fusions import fused_bias_dropout, fused_bias_gelu
from torch import nn

from tf_adapters.megatron.chunks import hook_biases

WIDTH = 4
FUSED: Any = SimpleNamespace(bias_activation_fusion=True, bias_dropout_fusion=True)


class Linear(nn.Linear):
    """Megatron's, with skip_bias_add: it hands its bias out."""

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


class Layers(nn.Module):
    """Two linear layers with Megatron's own fused functions behind them, and what passes them by."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.first, self.second = nn.ModuleList(Linear(WIDTH, WIDTH) for _ in range(2)), Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for first in self.first:
            y, bias = first(x)
            y = fused_bias_gelu.GeLUFunction.apply(y, bias)
            x = fused_bias_dropout.bias_dropout_add_fused_train(self.second(y), x, 0.0)
        return x


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Megatron's functions behind a compiler that is quick and counts: the name of each, for each of its graphs."""
    names: list[str] = []
    if torch._dynamo.config.disable:
        pytest.skip("torch.compile is switched off here (TORCHDYNAMO_DISABLE)")
    torch._dynamo.reset()
    for module, name in (
        (fused_bias_dropout, "bias_dropout_add_fused_train"),
        (fused_bias_gelu, "bias_gelu"),
        (fused_bias_gelu, "bias_gelu_back"),
    ):
        function = getattr(module, name)
        original = getattr(function, "_torchdynamo_orig_callable", function)

        def count(graph: Any, inputs: Any, name: str = name) -> Any:
            names.append(name)
            return graph.forward

        monkeypatch.setattr(module, name, torch.compile(original, backend=count))
    yield names
    torch._dynamo.reset()


def masks(model: Layers) -> list[dict[nn.Parameter, bool]]:
    """Every combination of what is a unit in Megatron: a layer's weight with its bias, and the embedding."""
    modules = [model.embedding, *model.first, model.second]
    flags = product((True, False), repeat=len(modules))
    return [{p: flag for m, flag in zip(modules, of_all, strict=True) for p in m.parameters()} for of_all in flags]


def gradients(model: Layers, mask: dict[nn.Parameter, bool]) -> dict[str, torch.Tensor]:
    for parameter, trains in mask.items():
        parameter.requires_grad_(trains)
        parameter.grad = None
    output = model(torch.arange(5))
    assert output.requires_grad == any(mask.values())
    if output.requires_grad:
        output.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("hooked", [True, False])
def test_masks_are_no_variants_of_the_compiled_functions(compiled: list[str], hooked: bool) -> None:
    torch.manual_seed(0)
    model = Layers()
    all_masks = masks(model)
    ordinary = [gradients(model, mask) for mask in all_masks]
    compiled.clear()
    torch._dynamo.reset()
    hooks = hook_biases(model, FUSED) if hooked else []
    for mask, expected in zip(all_masks, ordinary, strict=True):
        found = gradients(model, mask)
        assert found.keys() == expected.keys() == {n for n, p in model.named_parameters() if mask[p]}
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    most = max(compiled.count(name) for name in set(compiled))
    assert (most <= 3) == hooked, compiled
    for hook in hooks:
        hook.remove()


def test_without_fused_functions_nothing_is_hooked() -> None:
    assert hook_biases(Layers(), SimpleNamespace(bias_activation_fusion=False, bias_dropout_fusion=False)) == []


def test_a_frozen_prefix_needs_no_gradient() -> None:
    model = Layers()
    hook_biases(model, FUSED)
    model.requires_grad_(False)
    output, bias = model.second(torch.zeros(2, WIDTH))
    assert not output.requires_grad
    assert not bias.requires_grad
