"""Megatron's own layers of which rows can be frozen.

A tensor-parallel layer's rows are those of its shard, the same ones on every rank of the group. Source:
megatron/core/tensor_parallel/layers.py.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from tf_adapters.masking.rows import (
    RowLayer,
    Tensors,
    bias_gradient,
    embedding_gradient,
    is_frozen,
    linear_gradient,
    plain_layer,
    trained_rows,
)
from tf_adapters.selection.rows import FrozenRows


def parallel_layer(module: torch.nn.Module) -> RowLayer | None:
    """Rows of a layer of a Megatron model; None for one whose gradients a tap on its output cannot make.

    That is where the output that the host hands on has been gathered or scattered (sequence parallelism), for
    experts, for shared embeddings and for all layers of Transformer Engine.
    """
    own = dict(module.named_parameters(recurse=False))
    if "weight" not in own or not own["weight"].requires_grad or len(own["weight"]) < 2:
        return None
    if type(module) is VocabParallelEmbedding:
        shared = {"shared_embedding", "zero_out_wgrad"} & set(vars(own["weight"]))
        return None if shared or module.reduce_scatter_embeddings else VocabParallelRows(module)
    if type(module) not in (ColumnParallelLinear, RowParallelLinear):
        return plain_layer(module)
    apart = module.is_expert or module.explicit_expert_comm
    moved = module.sequence_parallel or getattr(module, "gather_output", False)
    if apart or moved or not getattr(module, "input_is_parallel", True) or "shared_embedding" in vars(own["weight"]):
        return None
    return ParallelLinearRows(module, tuple(name for name in ("weight", "bias") if name in own and _trains(own[name])))


def _trains(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad and bool(parameter.numel())


class ParallelLinearRows(RowLayer):
    """A column- or row-parallel linear layer, with its bias: Megatron trains none whose weight is frozen."""

    def gradients(self, rows: FrozenRows, parameters: Tensors, inputs: torch.Tensor, gradient: torch.Tensor) -> Tensors:
        weight, *bias = parameters
        # With gradient_accumulation_fusion an earlier microbatch told DDP, for the rest of the batch, that a kernel
        # adds this weight's gradients up. It adds none for a frozen weight: this one is DDP's to add.
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = False
        of_bias = [bias_gradient(rows, of, gradient) for of in bias]
        return linear_gradient(rows, weight, inputs, gradient), *of_bias

    def tapped(self, result: Any, inputs: torch.Tensor, rows: FrozenRows, parameters: Tensors) -> Any:
        """The output with the tap on it, and the bias that the host is still to add, if any."""
        output, bias_to_add = result
        if bias_to_add is None:
            return super().tapped(output, inputs, rows, parameters), None
        output = super().tapped(output, inputs, rows, parameters[:1])
        return output, trained_rows(bias_to_add, rows) if len(parameters) > 1 else bias_to_add


class VocabParallelRows(RowLayer):
    """This rank's part of the vocabulary; tokens of other parts add nothing to it."""

    def gradients(self, rows: FrozenRows, parameters: Tensors, inputs: torch.Tensor, gradient: torch.Tensor) -> Tensors:
        first: Any = self.module.vocab_start_index
        tokens = inputs - first
        skipped = is_frozen(rows, tokens) | (tokens < 0) | (tokens >= rows.total)
        return (embedding_gradient(rows, parameters[0], tokens, skipped=skipped, gradient=gradient),)
