"""Transformer Engine's modules next to torch's, with the same values, as a rank of the tests runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import gelu, layer_norm, linear, relu, rms_norm, scaled_dot_product_attention, silu

from tf_adapters.testing import relative_error

WIDTH, OUT, TOKENS = 8, 12, 10
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geglu": lambda x: gelu(x, approximate="tanh"),
    "reglu": relu,
    "swiglu": silu,
    "qgeglu": lambda x: x * torch.sigmoid(1.702 * x),
}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": GATES["geglu"],
    "relu": relu,
    "qgelu": GATES["qgeglu"],
    "srelu": lambda x: relu(x) ** 2,
}
SPLITS = [4, 0, 6]
Reference = Callable[[dict[str, torch.nn.Parameter], torch.Tensor], torch.Tensor]


def install() -> None:
    from tf_adapters.testing.transformer_engine_on_cpu import install

    install()
    torch.manual_seed(5)


def compare(module: Any, reference: Reference, *args: Any, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Errors of a module's output and of all gradients, by name."""
    named = dict(module.named_parameters())
    with torch.no_grad():
        for parameter in named.values():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    inputs = [torch.randn(TOKENS, WIDTH, dtype=dtype).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    outputs = [module(inputs[0], *args), reference(named, inputs[1])]
    weights = torch.randn(outputs[0].shape).to(dtype)
    pairs = {"output": outputs}
    gradients = []
    for output, given in zip(outputs, inputs, strict=True):
        values = [given, *named.values()]
        gradients.append(torch.autograd.grad(output, values, weights, retain_graph=True))
    for name, ours, theirs in zip(["input", *named], *gradients, strict=True):
        pairs[name] = [ours, theirs]
    return {
        name: relative_error(ours.detach().float(), theirs.detach().float()) for name, (ours, theirs) in pairs.items()
    }


def normalized(
    kind: str, x: torch.Tensor, values: Any, prefix: str = "layer_norm_", offset: float = 0.0
) -> torch.Tensor:
    weight = values[f"{prefix}weight"] + offset
    if kind == "RMSNorm":
        return rms_norm(x, x.shape[-1:], weight, 1e-5)
    return layer_norm(x, x.shape[-1:], weight, values[f"{prefix}bias"], 1e-5)


def linear_layer(dtype: torch.dtype, bias: bool) -> dict[str, float]:
    import transformer_engine.pytorch as te

    module = te.Linear(WIDTH, OUT, bias=bias, params_dtype=dtype)
    return compare(module, lambda p, x: linear(x, p["weight"], p.get("bias")), dtype=dtype)


def norm(kind: str, offset: float) -> dict[str, float]:
    import transformer_engine.pytorch as te

    module = getattr(te, kind)(WIDTH, eps=1e-5, zero_centered_gamma=bool(offset))
    return compare(module, lambda p, x: normalized(kind, x, p, "", offset))


def norm_and_linear(kind: str, offset: float) -> dict[str, float]:
    import transformer_engine.pytorch as te

    module = te.LayerNormLinear(WIDTH, OUT, normalization=kind, zero_centered_gamma=bool(offset))
    return compare(module, lambda p, x: linear(normalized(kind, x, p, offset=offset), p["weight"], p["bias"]))


def mlp(activation: str) -> dict[str, float]:
    import transformer_engine.pytorch as te

    def reference(p: dict[str, torch.nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        hidden = linear(normalized("LayerNorm", x, p), p["fc1_weight"], p["fc1_bias"])
        if activation in GATES:
            first, second = hidden.chunk(2, dim=-1)
            hidden = GATES[activation](first) * second
        else:
            hidden = ACTIVATIONS[activation](hidden)
        return linear(hidden, p["fc2_weight"], p["fc2_bias"])

    return compare(te.LayerNormMLP(WIDTH, 16, activation=activation), reference)


def experts(bias: bool) -> dict[str, float]:
    import transformer_engine.pytorch as te

    def reference(p: dict[str, torch.nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        parts = enumerate(x.split(SPLITS))
        return torch.cat([linear(part, p[f"weight{i}"], p.get(f"bias{i}")) for i, part in parts])

    return compare(te.GroupedLinear(len(SPLITS), WIDTH, OUT, bias=bias), reference, SPLITS)


def attention() -> float:
    """Causal, in bf16, where Transformer Engine uses its own softmax."""
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(2, 16, attention_dropout=0.0, attn_mask_type="causal")
    query, key, value = torch.randn(3, 32, 1, 2, 16, dtype=torch.bfloat16, requires_grad=True).unbind()
    ours = module(query, key, value)
    plain = scaled_dot_product_attention(*(x.permute(1, 2, 0, 3).float() for x in (query, key, value)), is_causal=True)
    theirs = plain.permute(2, 0, 1, 3).reshape(ours.shape)
    return relative_error(ours.detach().float(), theirs.detach())


def fused_accumulation(kind: str) -> dict[str, float]:
    """Errors in ``main_grad`` after two microbatches, added to what was there."""
    import transformer_engine.pytorch as te

    if kind == "Linear":
        module, args = te.Linear(WIDTH, OUT, bias=False, fuse_wgrad_accumulation=True), ()
    else:
        grouped = te.GroupedLinear(len(SPLITS), WIDTH, OUT, bias=False, fuse_wgrad_accumulation=True)
        module, args = grouped, (SPLITS,)
    expected = {}
    for name, parameter in module.named_parameters():
        parameter.main_grad = torch.ones_like(parameter)
        expected[name] = torch.ones_like(parameter)
    for _ in range(2):
        x, weights = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, OUT)
        module(x.requires_grad_(), *args).backward(weights)
        splits = SPLITS if args else [TOKENS]
        for total, part, gradient in zip(expected.values(), x.split(splits), weights.split(splits), strict=True):
            total += (gradient.t() @ part).detach()
    return {name: relative_error(p.main_grad, expected[name]) for name, p in module.named_parameters()}


def adam(decoupled: bool) -> list[float]:
    from transformer_engine.pytorch.optimizers import FusedAdam

    values = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
    copies = [torch.nn.Parameter(value.detach().clone()) for value in values]
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours = FusedAdam(values, adam_w_mode=decoupled, **settings)
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)(copies, **settings)
    for _ in range(3):
        for value, copy in zip(values, copies, strict=True):
            value.grad = torch.randn(5, 3)
            copy.grad = value.grad.clone()
        ours.step()
        theirs.step()
    return [relative_error(value.detach(), copy.detach()) for value, copy in zip(values, copies, strict=True)]


def lists() -> tuple[float, list[float], list[float], bool, bool]:
    """The norm of two tensors, of each; the first one scaled; whether an infinity was noticed, before and after it."""
    from transformer_engine.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale

    tensors, noticed = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])], torch.zeros(1, dtype=torch.int32)
    norm, each = multi_tensor_applier(multi_tensor_l2norm, noticed, [tensors], True)
    scaled = [torch.empty(2), torch.empty(1)]
    multi_tensor_applier(multi_tensor_scale, noticed, [tensors, scaled], 0.5)
    before = bool(noticed)
    multi_tensor_applier(multi_tensor_scale, noticed, [[torch.tensor([torch.inf])], [torch.empty(1)]], 0.5)
    return norm.item(), each.tolist(), scaled[0].tolist(), before, bool(noticed)


def absent_kernel() -> str:
    import transformer_engine_torch

    try:
        transformer_engine_torch.fused_attn_fwd()
    except NotImplementedError as error:
        return str(error)
    return ""


def megatron_layers() -> list[str]:
    """The types of the layers that Megatron-Core makes of its specification for Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec as spec

    attention = spec().submodules.self_attention.submodules
    return [attention.linear_qkv.__name__, attention.linear_proj.__name__]
