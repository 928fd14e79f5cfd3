"""Weight the tokens in the weight gradients of a Megatron-Core model by given samples, without changing outputs.

It covers Megatron's own linear layers and those of Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import layer_norm, linear, rms_norm

from tf_adapters.overrides import Overrides
from tf_adapters.testing.oracle import Sampled, Samples, of_other_gradient

__all__ = ["sampled_layers"]


@contextmanager
def sampled_layers(model: torch.nn.Module, samples: Samples) -> Iterator[None]:
    """Weight tokens by ``samples`` in the gradients of these weights of ``model``, inside the block."""
    by_layer: dict[str, dict[str, Sampled]] = {}
    for name, sampled in samples.items():
        prefix, _, own = name.rpartition(".")
        by_layer.setdefault(prefix, {})[own] = sampled
    with Overrides() as overrides:
        for prefix, of_layer in by_layer.items():
            layer: Any = model.get_submodule(prefix)
            if hasattr(layer, "_forward_impl"):
                product = partial(_product, layer._forward_impl, of_layer["weight"])
                overrides.set(layer, "_forward_impl", product)
            else:
                overrides.set(layer, "forward", partial(_of_engine, layer, of_layer))
        yield


def _product(run: Callable[..., Any], sampled: Sampled, *, input: Any, weight: Any, bias: Any, **more: Any) -> Any:
    """Compute the product of one of Megatron's own layers."""
    whole = _all_tokens(input, more["tp_group"]) if more["sequence_parallel"] else input
    counted = run(input=sampled.counted(whole), weight=weight, bias=None, **{**more, "sequence_parallel": False})
    output = of_other_gradient(run(input=input, weight=weight.detach(), bias=None, **more), counted)
    return output if bias is None else output + bias


def _all_tokens(inputs: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather the tokens of all ranks: under sequence parallelism a rank has some of them, and draws from all."""
    whole = inputs.new_empty((inputs.shape[0] * group.size(), *inputs.shape[1:]))
    torch.distributed.all_gather_into_tensor(whole, inputs.detach().contiguous(), group=group)
    return whole


def _of_engine(layer: Any, samples: Mapping[str, Sampled], inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a layer of Transformer Engine, and add the difference that the sample makes to its gradient."""
    result = type(layer).forward(layer, inputs, *args, **kwargs)
    output, *rest = result if isinstance(result, tuple) else (result,)
    of_product = _normalized(layer, inputs.detach())
    column = layer.sequence_parallel and layer.parallel_mode == "column"
    of_product = _all_tokens(of_product, layer.tp_group) if column else of_product
    parts = torch.split(of_product, [int(n) for n in args[0]]) if args else [of_product]
    weights = [f"weight{number}" for number in range(len(parts))] if args else ["weight"]
    differences = []
    for weight, part in zip(weights, parts, strict=True):
        other = samples[weight].counted(part) - part if weight in samples else torch.zeros_like(part)
        differences.append(linear(other, getattr(layer, weight)))
    difference = torch.cat(differences)
    if layer.sequence_parallel and layer.parallel_mode == "row":
        from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region

        difference = reduce_scatter_to_sequence_parallel_region(difference, group=layer.tp_group)
    output = of_other_gradient(output, difference)
    return (output, *rest) if isinstance(result, tuple) else output


def _normalized(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return inputs
    weight, bias = weight.detach() + float(layer.zero_centered_gamma), layer.layer_norm_bias
    if layer.normalization == "RMSNorm":
        return rms_norm(inputs, weight.shape, weight, layer.eps)
    return layer_norm(inputs, weight.shape, weight=weight, bias=bias.detach(), eps=layer.eps)
