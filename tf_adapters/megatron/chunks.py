"""One model chunk of this rank: its stage, its parameters, and what masking it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tf_adapters.megatron.ddp import FrozenGradients
from tf_adapters.selection.masks import NOTHING_FROZEN, Mask

_FUSIONS = ("bias_activation_fusion", "bias_dropout_fusion")


class Chunk:
    """A model chunk as the schedule gets it (wrapped), as its ``stage`` of the pipeline.

    ``model`` is the innermost module, and ``parameters`` its parameters by the names that they have there.
    """

    def __init__(self, stage: int, wrapped: torch.nn.Module) -> None:
        self.stage = stage
        self.model = innermost(wrapped)
        self.parameters = dict(self.model.named_parameters())
        self.gradients = FrozenGradients(wrapped, self.parameters)
        self._mask = NOTHING_FROZEN
        self._hooks: list[Any] = []

    def hook(self, config: Any) -> None:
        """Put our hooks on the model, whose TransformerConfig this is."""
        self.gradients.hook()
        self._hooks += hook_biases(self.model, config)
        if config.recompute_granularity is not None:
            for module in self.model.modules():
                if isinstance(getattr(module, "word_embeddings", None), torch.nn.Module):  # in a submodule, maybe
                    self._hooks.append(module.register_forward_hook(self._keep_gradients))
                if hasattr(module, "_checkpointed_forward"):  # a block of layers, of language, vision or state space
                    hook = module.register_forward_pre_hook(self._keep_inputs_gradients, with_kwargs=True)
                    self._hooks.append(hook)

    def __deepcopy__(self, memo: Any) -> Chunk:
        """A copy of the model has our hooks, not another chunk of the pipeline."""
        return self

    def close(self) -> None:
        self.gradients.remove()
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def masked(self, mask: Mask) -> Iterator[None]:
        """Around a forward or backward under ``mask``, for what Megatron must not stumble over."""
        self._mask = mask
        try:
            with self.gradients.hidden(mask.names), self.gradients.kept_totals(mask.names):
                yield
        finally:
            self._mask = NOTHING_FROZEN

    def _keep_gradients(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Recomputed segments pass gradients only if their input needs one.

        Behind a frozen embedding, whether we froze it or the user, it does not, and the whole stage would lose its
        gradients without a word.
        """
        self._require_gradients(output if isinstance(output, tuple) else (output,))

    def _keep_inputs_gradients(self, module: torch.nn.Module, inputs: Any, named: Any) -> None:
        """The same at the entrance of a block of layers, whatever embeds its input (an image encoder, say)."""
        self._require_gradients(inputs[:1] or (named.get("hidden_states"),))

    def _require_gradients(self, tensors: tuple[Any, ...]) -> None:
        for tensor in tensors if torch.is_grad_enabled() and not self._mask.complete else ():
            if torch.is_tensor(tensor) and tensor.is_floating_point() and not tensor.requires_grad:
                tensor.requires_grad_()


def innermost(module: Any) -> torch.nn.Module:
    """The model inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    return module  # type: ignore[no-any-return]


def device_of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    """The device of this rank's model; a chunk of an "empty stage" layout has no parameters."""
    devices = (parameter.device for chunk in chunks for parameter in chunk.parameters())
    fallback = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return next(devices, fallback)


def hook_biases(model: torch.nn.Module, config: Any) -> list[Any]:
    """Hooks on the layers that hand out their bias, where the model's TransformerConfig fuses what takes it.

    Masks must not be what Megatron's compiled functions are compiled for. ``jit_fuser`` is torch.compile: it compiles a
    function anew for every combination of its arguments' ``requires_grad``, and after eight of them runs it uncompiled,
    without a word. Linear layers hand their bias to such functions. Here it is always a tensor that requires a gradient
    where the layer's output does, which is one combination less for every mask; what then comes for a frozen bias ends
    there. Source: megatron/core/jit.py, fusions/fused_bias_dropout.py, fusions/fused_bias_gelu.py.
    """
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
