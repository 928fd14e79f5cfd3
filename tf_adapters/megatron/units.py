"""Megatron's rules for freeze units, and the weights that several stages share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tf_adapters.hosts.units import UnitRules, units_of, weights_with_biases
from tf_adapters.measuring.estimates import grouped
from tf_adapters.selection.freeze_units import FreezeUnit, Tie, joined

_LAYERS = ("linear_fc1", "linear_fc2")


def unit_rules(config: Any, expert_parallel_size: int) -> UnitRules:
    """Return Megatron's rules; ``config`` is the model's TransformerConfig.

    A weight and its bias are one unit, because Megatron's linear layer computes no bias gradient for a frozen weight.
    """
    return UnitRules(
        groups=weights_with_biases,
        is_table=lambda m: isinstance(m, torch.nn.Embedding) or type(m).__name__ == "VocabParallelEmbedding",
        projects=lambda name, parameter: "zero_out_wgrad" in vars(parameter),  # tied to the stage's output layer
        token_share=lambda prefix: _token_share(prefix, config, expert_parallel_size),
    )


def chunk_units(model: torch.nn.Module, config: Any, expert_parallel_size: int) -> tuple[FreezeUnit, ...]:
    """Return the units of a model chunk.

    Transformer Engine's fused experts have one flag for both of their layers: these two are then one unit.
    Source: transformer_engine/pytorch/ops/fused/grouped_mlp.py.
    """
    units = [
        unit
        for unit in units_of(model, unit_rules(config, expert_parallel_size))
        if not _is_unused(model, model.get_parameter(unit.names[0]))
    ]
    if not getattr(config, "use_transformer_engine_op_fuser", False):  # from 0.17 on
        return tuple(units)
    experts = [
        prefix
        for prefix, module in model.named_modules()
        if all(hasattr(getattr(module, layer, None), "num_gemms") for layer in _LAYERS)
    ]
    mlps = {f"{prefix}.{layer}": prefix for prefix in experts for layer in _LAYERS}
    together = grouped((mlps.get(unit.names[0].rpartition(".")[0], unit.names[0]), unit) for unit in units)
    return tuple(map(joined, together.values()))


def _is_unused(model: Any, parameter: torch.nn.Parameter) -> bool:
    """Return whether this is the unused weight of an output layer whose stage also has the embedding.

    Megatron makes it for multi-token prediction with tied embeddings, but computes with the embedding's copy.
    """
    tied, predicts = (getattr(model, name, False) for name in ("share_embeddings_and_output_weights", "mtp_process"))
    return tied and predicts and parameter is getattr(getattr(model, "output_layer", None), "weight", None)


def tied_places(parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> Tie:
    """Return (stage, name) of this rank's copies of the embedding that the first and the last stage share."""
    return tuple(
        (stage, name)
        for stage, of_stage in parameters.items()
        for name, parameter in of_stage.items()
        if "shared_embedding" in vars(parameter)
    )


def _token_share(prefix: str, config: Any, expert_parallel_size: int) -> float:
    """Return the share of a rank's tokens that reach a module. An expert gets only the tokens routed to it.

    A model without routed experts (``num_moe_experts`` is None) may still have a module of the user with this name.
    """
    if "experts" not in prefix.split(".") or config.num_moe_experts is None:
        return 1.0
    return float(config.moe_router_topk * expert_parallel_size / config.num_moe_experts)
