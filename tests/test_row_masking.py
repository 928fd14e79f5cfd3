"""Layers of which only some rows train: their gradients are those of the full layer, zero in frozen rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tf_adapters.masking.rows import LinearRows, RowMask, plain_layer, row_layers
from tf_adapters.selection.rows import FrozenRows
from tf_adapters.testing import relative_error

TOKENS, IN, OUT = 6, 5, 8
BLOCKS = [(0, 3), (2, 4), (6, 5), (7, 1), (0, 7)]  # first, count: two of them go round
each_block = pytest.mark.parametrize("block", BLOCKS, ids=str)


class Net(nn.Module):
    """Two linear layers with something in place behind the first; the input may need a gradient or not."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(IN, OUT, bias=bias)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(OUT, OUT, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x))).tanh()


class Tokens(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(OUT, IN, **options)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).tanh()


def gradients(model: nn.Module, x: torch.Tensor, run: Callable[..., torch.Tensor] | None = None) -> dict[str, Any]:
    """Gradients of every parameter, and of the input where it has one."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    output = (run or nn.Module.__call__)(model, x)
    (output.float() * torch.arange(output.numel()).reshape(output.shape).sin()).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {**found, "input": x.grad}


def check(
    model: nn.Module,
    x: torch.Tensor,
    block: tuple[int, int],
    names: tuple[str, ...],
    run: Callable[..., torch.Tensor] | None = None,
    tolerance: float = 1e-6,
) -> None:
    full = gradients(model, x, run)
    layers = row_layers(model, plain_layer)
    mask = RowMask(layers)
    rows = [FrozenRows((name,), *block, OUT) for name in names]
    with mask.frozen(rows):
        masked = gradients(model, x, run)
    for of_unit in rows:
        for start, stop in of_unit.frozen:
            assert masked[of_unit.names[0]][start:stop].abs().max() == 0
            full[of_unit.names[0]][start:stop] = 0
    for name, expected in full.items():
        actual = masked[name]
        assert (actual is None) == (expected is None), name
        if expected is not None:
            assert actual.dtype == expected.dtype
            assert relative_error(actual, expected) <= tolerance, name
    assert all(p.requires_grad for p in model.parameters())
    mask.remove()
    assert all("forward" not in vars(layer.module) for layer in layers.values())


@each_block
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(TOKENS, IN), (2, 3, IN), (IN,)], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["first layer", "inner layer"])
def test_linear(block: tuple[int, int], bias: bool, shape: tuple[int, ...], first: bool) -> None:
    check(Net(bias), torch.randn(shape, requires_grad=not first), block, ("first.weight", "second.weight"))


@each_block
@pytest.mark.parametrize("padding", [None, 0, 3])
def test_embedding(block: tuple[int, int], padding: int | None) -> None:
    tokens = torch.tensor([[0, 1, 3, 3], [7, 2, 5, 0]])
    check(Tokens(padding_idx=padding), tokens, block, ("table.weight",))


def test_rows_go_round() -> None:
    rows = FrozenRows(("weight",), 6, 5, 8)
    assert (rows.frozen, rows.trained) == (((0, 3), (6, 8)), ((3, 6),))
    rows = FrozenRows(("weight",), 2, 3, 8)
    assert (rows.frozen, rows.trained) == (((2, 5),), ((0, 2), (5, 8)))
    assert FrozenRows(("weight",), 5, 3, 8).trained == ((0, 5),)


@each_block
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_recomputation(block: tuple[int, int], reentrant: bool) -> None:
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=reentrant)

    check(Net(), torch.randn(TOKENS, IN, requires_grad=True), block, ("first.weight", "second.weight"), run)


def test_recomputation_that_stops_early_leaves_nothing_frozen() -> None:
    """Non-reentrant recomputation ends by an error inside of the last layer that keeps something."""
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, OUT))
    layers = row_layers(model, plain_layer)
    rows = [FrozenRows((name,), 1, 3, OUT) for name in ("0.weight", "2.weight")]
    with RowMask(layers).frozen(rows):
        checkpoint(model, torch.randn(TOKENS, IN), use_reentrant=False).sum().backward()
        assert all(p.requires_grad for p in model.parameters())
    assert all(p.grad is not None for p in model.parameters())


@each_block
def test_bf16(block: tuple[int, int]) -> None:
    x = torch.randn(TOKENS, IN, dtype=torch.bfloat16, requires_grad=True)
    check(Net().bfloat16(), x, block, ("first.weight", "second.weight"), tolerance=1e-2)


def test_autocast() -> None:
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    x = torch.randn(2, 3, IN, requires_grad=True)
    check(Net(), x, (2, 4), ("first.weight", "second.weight"), run, tolerance=2e-2)


def test_the_weight_gradient_of_frozen_rows_is_not_computed() -> None:
    """And none is where a backward wants input gradients only."""
    layer = nn.Linear(IN, OUT)
    layers = row_layers(layer, plain_layer)
    x = torch.randn(TOKENS, IN, requires_grad=True)
    with RowMask(layers).frozen([FrozenRows(("weight",), 1, 6, OUT)]):
        output = layer(x)
        assert products(lambda: torch.autograd.grad(output.sum(), x, retain_graph=True)) == [(TOKENS, OUT, IN)]
        assert products(lambda: output.sum().backward()) == [(1, TOKENS, IN), (1, TOKENS, IN), (TOKENS, OUT, IN)]


def products(run: Callable[[], Any]) -> list[tuple[int, int, int]]:
    """Sizes (m, k, n) of the matrix products that run, sorted."""
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    shapes = [event.input_shapes for event in profile.events() if event.name == "aten::mm"]
    return sorted((a[0], a[1], b[1]) for a, b, *_ in shapes)


def test_without_rows_nothing_changes() -> None:
    model, x = Net(), torch.randn(TOKENS, IN, requires_grad=True)
    alone = gradients(model, x)
    mask = RowMask(row_layers(model, plain_layer))
    ours = gradients(model, x)
    assert all(torch.equal(ours[name], value) for name, value in alone.items())
    with mask.frozen([FrozenRows(("first.weight",), 0, 2, OUT)]), torch.no_grad():
        assert model(x).grad_fn is None


def test_an_error_in_the_layer_leaves_nothing_frozen() -> None:
    layer = nn.Linear(IN, OUT)
    mask = RowMask(row_layers(layer, plain_layer))
    with pytest.raises(RuntimeError), mask.frozen([FrozenRows(("weight",), 0, 2, OUT)]):
        layer(torch.randn(TOKENS, IN + 1))
    assert layer.weight.requires_grad


def test_a_deep_copy_has_layers_of_its_own() -> None:
    layer = nn.Linear(IN, OUT)
    (row_layer,) = row_layers(layer, plain_layer).values()
    row_layer.install()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    row_layer.frozen = FrozenRows(("weight",), 0, 2, OUT)
    assert other(torch.randn(TOKENS, IN)).abs().max() == 0
    assert layer(torch.randn(TOKENS, IN)).abs().max() > 0


def test_what_a_tap_cannot_do_right_has_no_rows() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "linear": nn.Linear(IN, OUT),
            "frozen": nn.Linear(IN, OUT).requires_grad_(False),
            "special": Special(IN, OUT),
            "one row": nn.Linear(IN, 1),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(IN, OUT)),
            "table": nn.Embedding(OUT, IN),
            "clipped": nn.Embedding(OUT, IN, max_norm=1.0),
            "sparse": nn.Embedding(OUT, IN, sparse=True),
            "scaled": nn.Embedding(OUT, IN, scale_grad_by_freq=True),
            "tied": nn.Embedding(OUT, IN),
            "head": nn.Linear(IN, OUT, bias=False),
            "replaced": nn.Linear(IN, OUT),
            "norm": nn.LayerNorm(IN),
        }
    )
    model["head"].weight = model["tied"].weight
    model["replaced"].forward = torch.tanh
    assert set(row_layers(model, plain_layer)) == {("linear.weight",), ("table.weight",)}


def test_keyword_inputs() -> None:
    layer, x = nn.Linear(IN, OUT), torch.randn(TOKENS, IN)
    layers = row_layers(layer, plain_layer)
    assert isinstance(layers[("weight",)], LinearRows)
    with RowMask(layers).frozen([FrozenRows(("weight",), 0, 2, OUT)]):
        layer(input=x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad[:2].abs().max() == 0
    assert layer.weight.grad[2:].abs().min() > 0
