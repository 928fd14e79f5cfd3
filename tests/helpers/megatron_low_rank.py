"""Low-rank adapters beside Megatron's parallel linear layers, built of the same layers as PEFT builds them."""

from __future__ import annotations

from typing import Any

import torch
from rank_pools import seed
from torch import nn

RANK = 3


class LowRankParallelLinear(nn.Module):
    """A ColumnParallelLinear or RowParallelLinear as it was, frozen, plus a trainable product of two thin matrices."""

    def __init__(self, base: Any) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self.base = base.requires_grad_(False)
        common = {"config": base.config, "init_method": nn.init.xavier_normal_, "bias": False, "skip_bias_add": False}
        if isinstance(base, ColumnParallelLinear):
            self.lora_a = nn.Linear(base.input_size, RANK, bias=False)
            self.lora_b = ColumnParallelLinear(RANK, base.output_size, gather_output=False, **common)
        else:
            self.lora_a = RowParallelLinear(base.input_size, RANK, input_is_parallel=True, **common)
            self.lora_b = nn.Linear(RANK, base.output_size, bias=False)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.base(x, *args, **kwargs)
        return output + _only(self.lora_b(_only(self.lora_a(x)))), bias


def with_adapters(layer: Any) -> None:
    """Put adapters beside all linear layers of a transformer layer."""
    seed(layer.layer_number)
    for owner, name in (
        (layer.self_attention, "linear_qkv"),
        (layer.self_attention, "linear_proj"),
        (layer.mlp, "linear_fc1"),
        (layer.mlp, "linear_fc2"),
    ):
        setattr(owner, name, LowRankParallelLinear(getattr(owner, name)))


def _only(output: Any) -> torch.Tensor:
    """Megatron's layers return their bias beside the output."""
    return output[0] if isinstance(output, tuple) else output
