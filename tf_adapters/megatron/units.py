"""What Megatron can freeze on its own, how much work that spares, and which weights several stages hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tf_adapters.selection.units import FreezeUnit, Tie


def units_of(chunk: torch.nn.Module, config: Any, expert_parallel_size: int) -> tuple[FreezeUnit, ...]:
    """The units of one model chunk (without its wrappers); ``config`` is its TransformerConfig.

    A weight and its bias are one unit: Megatron's linear layer gives a frozen weight's bias no gradient either.
    All of a grouped linear's weights are one: it asks only the first one whether it trains.
    """
    units = []
    known = dict(chunk.named_parameters())  # a parameter that two modules share has one name there
    for prefix, module in chunk.named_modules():
        own = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and parameter.numel() and _full(prefix, name) in known
        }
        for names in _groups(module, own):
            work = sum(_work(module, own[name]) for name in names) * _tokens(prefix, config, expert_parallel_size)
            full = tuple(_full(prefix, name) for name in names)
            units.append(FreezeUnit(full, work, tuple(own[names[0]].shape)))
    return tuple(units)


def tied_places(parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> Tie:
    """(stage, name) of this rank's copies of the embedding that Megatron shares between first and last stage."""
    return tuple(
        (stage, name)
        for stage, of_stage in parameters.items()
        for name, parameter in of_stage.items()
        if "shared_embedding" in vars(parameter)
    )


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _groups(module: torch.nn.Module, own: Mapping[str, torch.nn.Parameter]) -> list[tuple[str, ...]]:
    """Names of parameters of one module that are frozen together."""
    if hasattr(module, "num_gemms"):  # Transformer Engine's GroupedLinear: weight0, weight1, ...
        return [tuple(own)] if own else []
    together = tuple(name for name in ("weight", "bias") if name in own)
    alone: list[tuple[str, ...]] = [(name,) for name in own if name not in together]
    return [together, *alone] if together else alone


def _work(module: torch.nn.Module, parameter: torch.nn.Parameter) -> float:
    """Elements that a token's weight gradient touches: all of a matrix, one row of an embedding table."""
    is_table = isinstance(module, torch.nn.Embedding) or type(module).__name__ == "VocabParallelEmbedding"
    also_projects = "zero_out_wgrad" in vars(parameter)  # tied to the output layer on the same stage
    return float(parameter.shape[-1] if is_table and not also_projects else parameter.numel())


def _tokens(prefix: str, config: Any, expert_parallel_size: int) -> float:
    """The share of a rank's tokens that reach a module: an expert sees only those routed to it."""
    if "experts" not in prefix.split("."):
        return 1.0
    return float(config.moe_router_topk * expert_parallel_size / config.num_moe_experts)
