"""What a Megatron model chunk can freeze on its own, how much work that spares, and which weights are tied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tf_adapters.hosts.units import units_of
from tf_adapters.megatron.units import chunk_units, tied_places, unit_rules
from tf_adapters.selection.freeze_units import FreezeUnit

DENSE: Any = SimpleNamespace(moe_router_topk=2, num_moe_experts=None)


class VocabParallelEmbedding(nn.Module):
    """Megatron's, by name: a table of this rank's part of the vocabulary."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))


class RowParallelLinear(nn.Module):
    """Megatron's linear layers are no nn.Linear; a bias may be missing, as None."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))
        self.bias = nn.Parameter(torch.zeros(4)) if bias else None


class GroupedLinear(nn.Module):
    """Transformer Engine's: one weight, and with ``bias`` one bias, for each expert."""

    def __init__(self, num_gemms: int, bias: bool = False) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            setattr(self, f"weight{index}", nn.Parameter(torch.zeros(4, 3)))
            if bias:
                setattr(self, f"bias{index}", nn.Parameter(torch.zeros(4)))


class Named(nn.Module):
    """A module of the given modules, dots in their names included."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def nested(path: str, module: nn.Module) -> nn.Module:
    for name in reversed(path.split(".")):
        module = Named(**{name: module})
    return module


def units(model: nn.Module, config: Any = DENSE, expert_parallel_size: int = 1) -> dict[tuple[str, ...], float]:
    """The work of each unit."""
    return {unit.names: unit.work for unit in units_of(model, unit_rules(config, expert_parallel_size))}


# --- which parameters are frozen together ----------------------------------------------------------------------


def test_a_weight_and_its_bias_are_one_unit_in_the_weights_stratum() -> None:
    model = Named(first=RowParallelLinear(), second=RowParallelLinear(bias=False))
    assert units_of(model, unit_rules(DENSE, 1)) == (
        FreezeUnit(("first.weight", "first.bias"), 16.0, (4, 3)),
        FreezeUnit(("second.weight",), 12.0, (4, 3)),
    )


def test_other_parameters_of_a_module_are_units_of_their_own() -> None:
    layer: Any = RowParallelLinear()
    layer.scale = nn.Parameter(torch.zeros(5))
    layer.layer_norm_weight = nn.Parameter(torch.zeros(3))
    layer.layer_norm_bias = nn.Parameter(torch.zeros(3))
    assert units(layer) == {
        ("weight", "bias"): 16.0,
        ("scale",): 5.0,
        ("layer_norm_weight",): 3.0,
        ("layer_norm_bias",): 3.0,
    }


@pytest.mark.parametrize("bias", [False, True])
def test_all_of_a_grouped_linear_is_one_unit(bias: bool) -> None:
    (unit,) = units_of(nested("mlp.linear_fc1", GroupedLinear(3, bias)), unit_rules(DENSE, 1))
    assert set(unit.names) == {
        f"mlp.linear_fc1.{kind}{index}" for kind in ["weight", "bias"][: 1 + bias] for index in range(3)
    }
    assert (unit.work, unit.shape) == (3 * (16.0 if bias else 12.0), (4, 3))


@pytest.mark.parametrize("fused", [False, True])
def test_both_layers_of_fused_experts_are_one_unit(fused: bool) -> None:
    """The fused kernel computes both weight gradients or none: a mask on one alone would change nothing."""
    config: Any = SimpleNamespace(moe_router_topk=2, num_moe_experts=2, use_transformer_engine_op_fuser=fused)
    mlp = Named(linear_fc1=GroupedLinear(2), linear_fc2=GroupedLinear(2), router=RowParallelLinear(bias=False))
    model = nested("layer.experts", mlp)
    first, second = ([f"layer.experts.linear_fc{n}.weight{i}" for i in range(2)] for n in (1, 2))
    router = FreezeUnit(("layer.experts.router.weight",), 12.0, (4, 3))
    apart = (FreezeUnit(tuple(first), 24.0, (4, 3)), FreezeUnit(tuple(second), 24.0, (4, 3)))
    together = (FreezeUnit((*first, *second), 48.0, (4, 3)),)
    assert chunk_units(model, config, 1) == (*(together if fused else apart), router)


def test_a_bias_alone_and_a_parameter_of_the_model_itself_are_units() -> None:
    model: Any = Named(layer=RowParallelLinear())
    model.layer.weight.requires_grad_(False)
    model.position = nn.Parameter(torch.zeros(2, 2))
    assert units(model) == {("position",): 4.0, ("layer.bias",): 4.0}


def test_what_the_user_froze_is_no_unit() -> None:
    model = Named(frozen=RowParallelLinear(), partly=RowParallelLinear(), grouped=GroupedLinear(2))
    model.frozen.requires_grad_(False)
    model.partly.bias.requires_grad_(False)
    model.grouped.requires_grad_(False)
    assert units(model) == {("partly.weight",): 12.0}
    assert not model.frozen.weight.requires_grad


def test_a_parameter_without_elements_and_a_module_without_parameters_are_no_unit() -> None:
    model = Named(empty=nn.Linear(0, 0, bias=False), dropout=nn.Dropout(), grouped=GroupedLinear(0))
    assert units(model) == {}


def test_every_trainable_parameter_is_in_one_unit() -> None:
    model = Named(
        embedding=VocabParallelEmbedding(6, 2),
        decoder=Named(a=RowParallelLinear(), norm=nn.LayerNorm(3), experts=GroupedLinear(2, bias=True)),
    )
    names = [
        name
        for unit in units_of(model, unit_rules(SimpleNamespace(moe_router_topk=1, num_moe_experts=2), 1))
        for name in unit.names
    ]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_weight_that_two_modules_of_a_stage_share_is_one_unit_by_its_parameters_name() -> None:
    """``named_parameters`` knows it by its first name only, and masks are made of those names."""
    model: Any = Named(embedding=nn.Embedding(6, 2), head=nn.Linear(2, 6, bias=False))
    model.head.weight = model.embedding.weight
    names = [name for unit in units_of(model, unit_rules(DENSE, 1)) for name in unit.names]
    assert names == [name for name, _ in model.named_parameters()] == ["embedding.weight"]


# --- work ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [VocabParallelEmbedding, nn.Embedding])
def test_an_embedding_works_on_one_row_for_each_token(table: Any) -> None:
    assert units(nested("embedding.word_embeddings", table(6, 2))) == {("embedding.word_embeddings.weight",): 2.0}


@pytest.mark.parametrize("table", [VocabParallelEmbedding, nn.Embedding])
def test_an_embedding_that_is_the_output_layer_too_works_on_all_of_it(table: Any) -> None:
    model = table(6, 2)
    model.weight.zero_out_wgrad = True  # what Megatron marks it with on a stage that is first and last
    (unit,) = units_of(model, unit_rules(DENSE, 1))
    assert (unit.names, unit.work, unit.shape) == (("weight",), 12.0, (6, 2))


def test_an_embedding_that_another_stage_shares_still_works_on_one_row() -> None:
    model = VocabParallelEmbedding(6, 2)
    model.weight.shared_embedding = True  # type: ignore[attr-defined]
    assert units(model) == {("weight",): 2.0}


@pytest.mark.parametrize(
    ("topk", "parallel", "experts", "share"), [(1, 1, 4, 0.25), (2, 1, 4, 0.5), (2, 2, 4, 1.0), (2, 4, 64, 0.125)]
)
@pytest.mark.parametrize(
    "path", ["layers.0.mlp.experts.local_experts.1.linear_fc1", "layers.0.mlp.experts.linear_fc2", "experts"]
)
def test_an_expert_works_on_the_tokens_that_are_routed_to_it(
    path: str, topk: int, parallel: int, experts: int, share: float
) -> None:
    config = SimpleNamespace(moe_router_topk=topk, num_moe_experts=experts)
    model = nested(path, RowParallelLinear())
    assert units(model, config, parallel) == {(f"{path}.weight", f"{path}.bias"): 16.0 * share}


def test_a_grouped_expert_works_on_its_share_of_the_tokens_too() -> None:
    config = SimpleNamespace(moe_router_topk=2, num_moe_experts=8)
    (unit,) = units_of(nested("mlp.experts.linear_fc1", GroupedLinear(4)), unit_rules(config, 2))
    assert unit.work == 4 * 12.0 * 2 * 2 / 8


def test_a_module_that_is_named_as_experts_works_on_all_tokens_of_a_dense_model() -> None:
    model = nested("layers.0.experts.linear_fc1", RowParallelLinear())
    assert units(model, DENSE) == {("layers.0.experts.linear_fc1.weight", "layers.0.experts.linear_fc1.bias"): 16.0}


@pytest.mark.parametrize("path", ["layers.0.mlp.shared_experts.linear_fc1", "layers.0.mlp.router", "experts_norm"])
def test_shared_experts_and_the_router_work_on_all_tokens(path: str) -> None:
    config = SimpleNamespace(moe_router_topk=1, num_moe_experts=4)
    assert units(nested(path, RowParallelLinear()), config, 2) == {(f"{path}.weight", f"{path}.bias"): 16.0}


# --- weights that several stages hold --------------------------------------------------------------------------


def marked(rows: int = 6) -> nn.Parameter:
    parameter: Any = nn.Parameter(torch.zeros(rows, 2))
    parameter.shared_embedding = True
    return parameter


def test_the_places_of_a_tied_embedding_are_those_that_megatron_marks() -> None:
    plain = nn.Parameter(torch.zeros(2, 2))
    first = {"embedding.word_embeddings.weight": marked(), "decoder.weight": plain}
    last = {"decoder.weight": plain, "output_layer.weight": marked()}
    assert tied_places({0: first}) == ((0, "embedding.word_embeddings.weight"),)
    assert tied_places({1: {"decoder.weight": plain}}) == ()
    assert tied_places({0: first, 2: {"decoder.weight": plain}, 3: last}) == (
        (0, "embedding.word_embeddings.weight"),
        (3, "output_layer.weight"),
    )
    assert tied_places({}) == ()
