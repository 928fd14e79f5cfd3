"""Transformer Engine's compiled extension in torch: products, norms, activations, softmax, optimizers.

The functions have the extension's names and arguments, and ``transformer_engine_on_cpu`` installs them. Tensors are
bf16, fp16 or fp32. Quantized tensors and communication inside a product are refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import gelu, layer_norm, relu, silu

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Activation = Callable[[Tensor], Tensor]

_gelu = functools.partial(gelu, approximate="tanh")

_NUMBERS = {2: torch.int32, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16}


def torch_type(number: Any) -> torch.dtype | None:
    """Convert a type of the extension's callers: a number, a torch type, or None."""
    return number if number is None or isinstance(number, torch.dtype) else _NUMBERS[int(number)]


def _plain(quantizer: Any) -> None:
    if quantizer is not None:
        kind = type(quantizer).__name__
        raise NotImplementedError(f"{kind}: quantized tensors need the compiled extension and a GPU")


def _written(out: Tensor | None, value: Tensor) -> Tensor:
    """Return ``value``, written to ``out`` if given."""
    return value if out is None else out.copy_(value.reshape(out.shape))


# Products. cuBLAS is column-major: its A @ B is op(B) @ op(A) in row-major order.


def _product(a: Tensor, transa: bool, b: Tensor, transb: bool, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > a.dtype.itemsize:  # fp32 sums, not rounded
        a, b = a.to(dtype), b.to(dtype)
    first = b.reshape(-1, b.shape[-1]).t() if transb else b
    second = a.reshape(-1, a.shape[-1])
    return torch.matmul(first, second.t() if transa else second).to(dtype)


def _into(out: Tensor | None, product: Tensor, accumulate: bool) -> Tensor:
    if out is None:
        return product
    return out.add_(product.reshape(out.shape)) if accumulate else _written(out, product)


def generic_gemm(
    a: Tensor,
    transa: bool,
    b: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    with_gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    alpha: float = 1.0,
    **_: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
    """Compute a product, its bias or the bias's gradient, and GELU or its derivative."""
    _plain(quantizer)
    if comm_overlap is not None:
        raise NotImplementedError("ub_overlap: communication inside a product needs the compiled extension and a GPU")
    product = _product(a, transa, b, transb, dtype=torch_type(dtype) or (a.dtype if out is None else out.dtype))
    if alpha != 1.0:
        product = product * alpha
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = b.reshape(-1, b.shape[-1]).sum(dim=0).to(bias.dtype)
    elif bias is not None:
        product = product + bias
    if with_gelu and grad:
        assert gelu_in is not None
        product = _derivative(_gelu, product, gelu_in)
    elif with_gelu:
        gelu_in, product = product, _gelu(product)
    return _into(out, product, accumulate), bias_gradient, gelu_in, None


def te_general_grouped_gemm(
    a: Tensors,
    transa: bool,
    b: Tensors,
    transb: bool,
    out: Tensors,
    dtype: Any,
    m_splits: Sequence[int] | None,
    bias: Tensors,
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Sequence[Tensor],
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    *_: Any,
) -> Tensors:
    """Compute one product per expert. An expert without tokens gives zeros, or adds nothing when accumulating."""
    outs: Tensors = out
    if single_output:
        sizes = [part.reshape(-1, part.shape[-1]).shape[0] for part in b]
        outs = torch.split(out[0].reshape(-1, out[0].shape[-1]), sizes)
    for number, (left, right, to) in enumerate(zip(a, b, outs, strict=True)):
        product = _product(left, transa, right, transb, dtype=to.dtype)
        of_bias = bias[number] if bias else None
        if of_bias is not None and of_bias.numel():
            if grad:
                of_bias.copy_(right.reshape(-1, right.shape[-1]).sum(dim=0))
            else:
                product = product + of_bias
        if gelu_in and gelu_in[number].numel():
            gelu_in[number].copy_(product)
            product = _gelu(product)
        _into(to, product, accumulate)
    return bias


# Norms: statistics in fp32.


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, _: int, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, means and inverse deviations."""
    _plain(quantizer)
    x = x.float()
    mean = x.mean(dim=-1)
    inverse = torch.rsqrt(x.var(dim=-1, unbiased=False) + eps)
    value = layer_norm(x, x.shape[-1:], weight=_gamma(weight, centered), bias=bias.float(), eps=eps)
    return _written(out, value.to(torch_type(dtype))), mean, inverse


def layernorm_bwd(
    gradient: Tensor, inputs: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, margin: int, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias."""
    dy, x = (tensor.reshape(-1, inputs.shape[-1]).float() for tensor in (gradient, inputs))
    normal = (x - mean.reshape(-1, 1)) * inverse.reshape(-1, 1)
    scaled = dy * _gamma(weight, centered)
    dx = scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True)
    dx = (dx * inverse.reshape(-1, 1)).to(inputs.dtype).reshape(inputs.shape)
    return dx, (dy * normal).sum(0).to(weight.dtype), dy.sum(0).to(weight.dtype)


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, _: int, centered: bool
) -> tuple[Tensor, None, Tensor]:
    """Return output and inverse root mean squares."""
    _plain(quantizer)
    x = x.float()
    inverse = torch.rsqrt(x.square().mean(dim=-1) + eps)
    value = x * inverse.unsqueeze(-1) * _gamma(weight, centered)
    return _written(out, value.to(torch_type(dtype))), None, inverse


def rmsnorm_bwd(
    gradient: Tensor, inputs: Tensor, inverse: Tensor, weight: Tensor, margin: int, centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight."""
    dy, x = (tensor.reshape(-1, inputs.shape[-1]).float() for tensor in (gradient, inputs))
    normal = x * inverse.reshape(-1, 1)
    scaled = dy * _gamma(weight, centered)
    dx = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * inverse.reshape(-1, 1)
    return dx.to(inputs.dtype).reshape(inputs.shape), (dy * normal).sum(0).to(weight.dtype)


# Activations. A gated one is function(first half) * second half.


def _gated(function: Activation, x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return function(first) * second


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return relu(x).square()


def _derivative(function: Activation, gradient: Tensor, x: Tensor, quantizer: Any = None) -> Tensor:
    """Return the gradient of ``function``'s input, computed in fp32."""
    _plain(quantizer)
    with torch.enable_grad():
        inputs = x.detach().float().requires_grad_()
        output = function(inputs)
    return torch.autograd.grad(output, inputs, gradient.reshape(output.shape).float())[0].to(x.dtype)


def activations() -> dict[str, Callable[..., Any]]:
    """Return each activation and its derivative by the extension's names."""
    plain: dict[str, Activation] = {"gelu": _gelu, "relu": relu, "qgelu": _qgelu, "srelu": _srelu, "silu": silu}
    gates: dict[str, Activation] = {"glu": torch.sigmoid, "geglu": _gelu, "reglu": relu, "qgeglu": _qgelu}
    gates |= {"sreglu": _srelu, "swiglu": silu}
    functions = plain | {name: functools.partial(_gated, gate) for name, gate in gates.items()}
    return {
        **{name: functools.partial(_activate, function) for name, function in functions.items()},
        **{f"d{name}": functools.partial(_derivative, function) for name, function in functions.items()},
    }


def _activate(function: Activation, x: Tensor, quantizer: Any = None) -> Tensor:
    _plain(quantizer)
    return function(x.float()).to(x.dtype)


def quantize(tensor: Tensor, quantizer: Any, *_: Any) -> Tensor:
    """Return the tensor unchanged, since quantizers are refused."""
    _plain(quantizer)
    return tensor


# Softmax of scaled scores, which unfused attention uses in bf16 and fp16.

_LOW = -10000.0


def _softmax(scores: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    scaled = scores.float() * scale
    return torch.softmax(scaled if hidden is None else scaled.masked_fill(hidden, _LOW), dim=-1).to(scores.dtype)


def scaled_masked_softmax_forward(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    return _softmax(scores, scale, mask.bool())


def scaled_upper_triang_masked_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    """Causal softmax: a row has no later column; the last row has the last column."""
    rows, columns = scores.shape[-2:]
    later = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
    return _softmax(scores.float().masked_fill(later, -math.inf), scale).to(scores.dtype)


def scaled_softmax_backward(gradient: Tensor, output: Tensor, scale: float) -> Tensor:
    dy, y = gradient.float(), output.float()
    return (scale * y * (dy - (dy * y).sum(-1, keepdim=True))).to(gradient.dtype)


# Optimizers: lists of tensors at once.


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Tensors], scale: Any) -> None:
    """Copy the tensors of the first list, scaled, to the second; set ``overflow`` for values that are not finite."""
    for source, to in zip(*lists, strict=True):
        to.copy_(source.float() * scale)
        overflow.logical_or_(~torch.isfinite(source).all())


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Tensors], each: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors together, and of each tensor."""
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in lists[0]]
    of_each = torch.stack(norms) if norms else torch.zeros(0)
    return torch.linalg.vector_norm(of_each).reshape(1), of_each if each else of_each.new_empty(0)


def multi_tensor_adam(
    chunk: int,
    overflow: Tensor,
    lists: Sequence[Tensors],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Update by Adam, or AdamW in mode 1. A fifth list has the fp32 values of parameters of another type."""
    if overflow.any():
        return
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    gradients, parameters, averages, squares, *masters = lists
    for number, parameter in enumerate(parameters):
        value = masters[0][number] if masters else parameter
        gradient, weight = gradients[number].float(), value.float()
        if not mode:
            gradient = gradient + decay * weight
        average = averages[number].float() * beta1 + gradient * (1 - beta1)
        square = squares[number].float() * beta2 + gradient * gradient * (1 - beta2)
        update = (average / first) / ((square / second).sqrt() + eps)
        if mode:
            update = update + decay * weight
        averages[number].copy_(average)
        squares[number].copy_(square)
        value.copy_(weight - lr * update)
        if masters:
            parameter.copy_(value)


_OWN_NAMES: tuple[Callable[..., Any], ...] = (
    *(generic_gemm, te_general_grouped_gemm, layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, quantize),
    *(scaled_softmax_backward, scaled_masked_softmax_forward),
    *(scaled_upper_triang_masked_softmax_forward, multi_tensor_scale, multi_tensor_l2norm, multi_tensor_adam),
)


def answers() -> dict[str, Callable[..., Any]]:
    """Return all functions of this module that replace one of the extension's, by name."""
    return {
        **{function.__name__: function for function in _OWN_NAMES},
        **activations(),
        "scaled_softmax_forward": _softmax,
        "scaled_aligned_causal_masked_softmax_forward": scaled_upper_triang_masked_softmax_forward,
        "scaled_aligned_causal_masked_softmax_backward": scaled_softmax_backward,
        "scaled_masked_softmax_backward": scaled_softmax_backward,
        "scaled_upper_triang_masked_softmax_backward": scaled_softmax_backward,
        "multi_tensor_scale_tensor": multi_tensor_scale,
    }
