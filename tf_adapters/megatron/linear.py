"""Taps on Megatron's own tensor-parallel linear layers.

The tap is on the matrix product, inside the layer's communication for tensor and sequence parallelism. The gradient of
the product's output is therefore already this rank's. Its input may have to be gathered again, as the host's backward
does.
Source: megatron/core/tensor_parallel/layers.py (``_forward_impl``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from tf_adapters.weight_gradients.engine_taps import linear_layer
from tf_adapters.weight_gradients.tapped_layer import Choose, Parameters, TappedLayer, linear_gradient


def tapped_layer(module: torch.nn.Module, sampled: bool = False) -> TappedLayer | None:
    """Return the tap of a layer of a Megatron model; None for an embedding and other layers without a tap.

    A layer gets no tap if its weight is shared, or if Megatron itself defers its weight gradient
    (``wgrad_deferral_limit``).
    """
    if type(module) not in (ColumnParallelLinear, RowParallelLinear):
        return linear_layer(module, sampled)
    weight = vars(module)["_parameters"].get("weight")
    if weight is None or not weight.requires_grad or not weight.is_floating_point():
        return None
    if "shared_embedding" in vars(weight) or getattr(module, "embedding_activation_buffer", None) is not None:
        return None
    # Megatron computes no gradient for a bias inside the product if the product's weight is frozen.
    inside = type(module) is ColumnParallelLinear and not module.skip_bias_add and module.bias is not None
    return ParallelLinearTap(module, ("weight", "bias") if inside else ("weight",))


class ParallelLinearTap(TappedLayer):
    """A column- or row-parallel linear layer."""

    attribute = "_forward_impl"

    def training(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Parameters:
        """Return the weight and bias of this product if the weight belongs to the layer and trains."""
        weight, bias = kwargs.get("weight"), kwargs.get("bias")
        own: Any = self.module
        if weight is None or weight is not own.weight or not weight.requires_grad:
            return ()
        return tuple(p for p in (weight, bias) if p is not None and p.requires_grad)

    def gradients(
        self, parameters: Parameters, inputs: torch.Tensor, gradient: torch.Tensor, choose: Choose | None = None
    ) -> tuple[torch.Tensor, ...]:
        weight, *biases = parameters
        # With gradient_accumulation_fusion, a kernel of the host adds up this weight's gradients, and this flag tells
        # DDP so. An earlier microbatch may have set it for the rest of the batch. DDP itself has to add this gradient.
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = False
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_weight = linear_gradient(weight, self._gathered(inputs), gradient, choose)
        return of_weight, *(flat.sum(dim=0) for _ in biases)

    def _gathered(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the whole input of the product. Under sequence parallelism each rank has a part of it."""
        module: Any = self.module
        if isinstance(module, RowParallelLinear) or not module.sequence_parallel or module.explicit_expert_comm:
            return inputs
        ranks = module.tp_group.size()
        whole = inputs.new_empty((inputs.shape[0] * ranks, *inputs.shape[1:]))
        torch.distributed.all_gather_into_tensor(whole, inputs.contiguous(), group=module.tp_group)
        return whole
