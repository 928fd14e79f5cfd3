"""Biases in Megatron's compiled functions: masks must not be what these functions are compiled for.

``jit_fuser`` is torch.compile. It compiles a function anew for every combination of its arguments' ``requires_grad``,
and after eight of them runs it uncompiled, without a word. Linear layers hand their bias to such functions. Here it is
always a tensor that requires a gradient where the layer's output does, which is one combination less for every mask;
what then comes for a frozen bias ends there.
Source: megatron/core/jit.py, fusions/fused_bias_dropout.py, fusions/fused_bias_gelu.py.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["hook_biases"]

_FUSIONS = ("bias_activation_fusion", "bias_dropout_fusion")


def hook_biases(model: torch.nn.Module, config: Any) -> list[Any]:
    """Hooks on the layers that hand out their bias, where the model's TransformerConfig fuses what takes it."""
    if not any(getattr(config, fusion, False) for fusion in _FUSIONS):
        return []
    layers = [module for module in model.modules() if isinstance(vars(module)["_parameters"].get("bias"), torch.Tensor)]
    return [layer.register_forward_hook(_with_constant_flags) for layer in layers]


def _with_constant_flags(layer: Any, inputs: Any, result: Any) -> Any:
    """The layer's result with its bias as said above; nothing else has this form and the layer's own bias in it."""
    if not (isinstance(result, tuple) and len(result) == 2):
        return None
    output, bias = result
    if bias is not layer.bias or not torch.is_tensor(output):
        return None
    if output.requires_grad and not bias.requires_grad:
        return output, _Frozen.apply(bias, output)  # type: ignore[no-untyped-call]
    return output, bias.view_as(bias)


class _Frozen(torch.autograd.Function):
    """The bias as a tensor that requires a gradient, since the output does, and passes it on to neither."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None
