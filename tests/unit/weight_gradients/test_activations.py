"""Activations require gradients under a mask where they do without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from tf_adapters.weight_gradients.activations import ActivationGraphs
from tf_adapters.weight_gradients.parameters import without_gradients


class Stage(torch.nn.Module):
    """A first stage: an embedding and two layers; activations are seen by ``look``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(7, 4)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.seen: list[bool] = []

    def look(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.requires_grad)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.look(self.table(tokens))
        x = self.look(torch.relu_(self.first(x)))
        return self.second(x)


class Two(torch.nn.Module):
    """Two outputs of a learned bias, and a mask that no parameter is in."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.bias * 1.0, {"mask": (x > 0).float(), "shifted": x + self.bias}


def frozen(model: torch.nn.Module, names: Sequence[str], call: Any, ends: bool = False) -> Any:
    graphs, parameters = ActivationGraphs(model), dict(model.named_parameters())
    with graphs.learned():
        call()
    with without_gradients([parameters[name] for name in names]), graphs.kept(ends=ends):
        return call()


TOKENS = torch.tensor([1, 2, 3])


@pytest.mark.parametrize("names", [["table.weight"], ["table.weight", "first.weight", "first.bias"]])
def test_a_frozen_prefix_keeps_its_activations_graph(names: list[str]) -> None:
    model = Stage()
    model(TOKENS).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.seen.clear()
    frozen(model, names, lambda: model(TOKENS)).sum().backward()
    assert all(model.seen)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) if name in names else torch.equal(parameter.grad, expected[name])


def test_a_stage_that_is_frozen_whole_ends_its_graph_at_its_output() -> None:
    model = Stage()
    output = frozen(model, [name for name, _ in model.named_parameters()], lambda: model(TOKENS), ends=True)
    assert not output.requires_grad
    assert all(model.seen)


def test_of_several_outputs_those_require_gradients_that_do_without_a_mask() -> None:
    model, x = Two(), torch.randn(4)
    first, rest = frozen(model, ["bias"], lambda: model(x))
    assert first.requires_grad
    assert rest["shifted"].requires_grad
    assert not rest["mask"].requires_grad


def test_a_parametrized_weight_is_no_activation() -> None:
    model = torch.nn.Sequential(weight_norm(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4))
    names = [name for name, _ in model.named_parameters() if name.startswith("0.")]
    seen = []
    model[0].register_forward_hook(lambda module, *_: seen.append(module.weight.requires_grad))
    assert frozen(model, names, lambda: model(torch.randn(3, 4))).requires_grad
    assert seen == [True, False]


def test_nothing_is_left_on_the_modules_nor_in_torch() -> None:
    model = Stage()
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    frozen(model, ["table.weight"], lambda: model(TOKENS))
    assert {name: list(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks for module in model.modules())
    assert not torch.nn.modules.module._global_forward_hooks
