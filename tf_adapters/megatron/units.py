"""What Megatron can freeze on its own, how much work that spares, and which weights several stages hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tf_adapters.hosts.units import UnitRules
from tf_adapters.selection.units import Tie


def unit_rules(config: Any, expert_parallel_size: int) -> UnitRules:
    """Megatron's rules; ``config`` is the model's TransformerConfig.

    A weight and its bias are one unit: Megatron's linear layer gives a frozen weight's bias no gradient either.
    All of a grouped linear's weights are one: it asks only the first one whether it trains.
    """
    return UnitRules(
        groups=_groups,
        is_table=lambda m: isinstance(m, torch.nn.Embedding) or type(m).__name__ == "VocabParallelEmbedding",
        projects=lambda name, parameter: "zero_out_wgrad" in vars(parameter),  # tied to the stage's output layer
        token_share=lambda prefix: _token_share(prefix, config, expert_parallel_size),
    )


def tied_places(parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> Tie:
    """(stage, name) of this rank's copies of the embedding that Megatron shares between first and last stage."""
    return tuple(
        (stage, name)
        for stage, of_stage in parameters.items()
        for name, parameter in of_stage.items()
        if "shared_embedding" in vars(parameter)
    )


def _groups(module: torch.nn.Module, own: Mapping[str, torch.nn.Parameter]) -> list[tuple[str, ...]]:
    """Names of parameters of one module that are frozen together."""
    if hasattr(module, "num_gemms"):  # Transformer Engine's GroupedLinear: weight0, weight1, ...
        return [tuple(own)] if own else []
    together = tuple(name for name in ("weight", "bias") if name in own)
    alone: list[tuple[str, ...]] = [(name,) for name in own if name not in together]
    return [together, *alone] if together else alone


def _token_share(prefix: str, config: Any, expert_parallel_size: int) -> float:
    """The share of a rank's tokens that reach a module: an expert sees only those routed to it."""
    if "experts" not in prefix.split("."):
        return 1.0
    return float(config.moe_router_topk * expert_parallel_size / config.num_moe_experts)
