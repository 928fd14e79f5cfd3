"""One model chunk of this rank: its stage, its parameters, and the hooks that masking needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tf_adapters.megatron.ddp import FrozenGradients
from tf_adapters.selection.masks import NOTHING_FROZEN, Mask

_FUSIONS = ("bias_activation_fusion", "bias_dropout_fusion")


class Chunk:
    """A model chunk of the schedule, with wrappers. It is ``stage`` of the pipeline.

    ``model`` is the innermost module, and ``parameters`` are its parameters by their names in it.
    """

    def __init__(self, stage: int, wrapped: torch.nn.Module) -> None:
        self.stage = stage
        self.model = innermost(wrapped)
        self.parameters = dict(self.model.named_parameters())
        self.gradients = FrozenGradients(wrapped, self.parameters)
        self._mask = NOTHING_FROZEN
        self._hooks: list[Any] = []

    def hook(self, config: Any) -> None:
        """Put our hooks on the model. ``config`` is its TransformerConfig."""
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
        """Return this object: a copy of the model shares it, since it is not another chunk of the pipeline."""
        return self

    def close(self) -> None:
        self.gradients.remove()
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def masked(self, mask: Mask) -> Iterator[None]:
        """Run a forward or backward under ``mask`` inside, with the precautions that Megatron needs."""
        self._mask = mask
        try:
            with self.gradients.hidden(mask.names), self.gradients.kept_totals(mask.names):
                yield
        finally:
            self._mask = NOTHING_FROZEN

    def _keep_gradients(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Make the output of an embedding require gradients.

        A recomputed segment computes gradients only if its input requires one. After a frozen embedding it does not,
        and the stage would silently lose its gradients.
        """
        self._require_gradients(output if isinstance(output, tuple) else (output,))

    def _keep_inputs_gradients(self, module: torch.nn.Module, inputs: Any, named: Any) -> None:
        """Do the same for the input of a block of layers, which an image encoder may have embedded."""
        self._require_gradients(inputs[:1] or (named.get("hidden_states"),))

    def _require_gradients(self, tensors: tuple[Any, ...]) -> None:
        for tensor in tensors if torch.is_grad_enabled() and not self._mask.complete else ():
            if torch.is_tensor(tensor) and tensor.is_floating_point() and not tensor.requires_grad:
                tensor.requires_grad_()


def innermost(module: Any) -> torch.nn.Module:
    """Return the model inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    return module  # type: ignore[no-any-return]


def device_of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    """Return the device of this rank's model. A chunk of an "empty stage" layout has no parameters."""
    devices = (parameter.device for chunk in chunks for parameter in chunk.parameters())
    fallback = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return next(devices, fallback)


def hook_biases(model: torch.nn.Module, config: Any) -> list[Any]:
    """Hook the layers that return their bias, if the model's TransformerConfig fuses the function that uses it.

    The hooks keep masks from causing recompilation. ``jit_fuser`` is torch.compile: it compiles a function again for
    every combination of its arguments' ``requires_grad``, and after eight combinations silently runs it uncompiled.
    Linear layers pass their bias to such functions. With the hook, the bias requires a gradient whenever the layer's
    output does, for every mask. The gradient of a frozen bias is then dropped.
    Source: megatron/core/jit.py, fusions/fused_bias_dropout.py, fusions/fused_bias_gelu.py.
    """
    if not any(getattr(config, fusion, False) for fusion in _FUSIONS):
        return []
    layers = [module for module in model.modules() if isinstance(vars(module)["_parameters"].get("bias"), torch.Tensor)]
    return [layer.register_forward_hook(_with_constant_flags) for layer in layers]


def _with_constant_flags(layer: Any, inputs: Any, result: Any) -> Any:
    """Return (output, bias) with a bias that requires a gradient exactly if the output does (see ``hook_biases``).

    Return None, which leaves the layer's result as it is, unless that is an output with the layer's own bias.
    """
    if not (isinstance(result, tuple) and len(result) == 2):
        return None
    output, bias = result
    if bias is not layer.bias or not torch.is_tensor(output):
        return None
    if output.requires_grad and not bias.requires_grad:
        return output, _Frozen.apply(bias, output)  # type: ignore[no-untyped-call]
    return output, bias.view_as(bias)


class _Frozen(torch.autograd.Function):
    """Returns the bias as a tensor that requires a gradient because the output does. Its backward passes on nothing."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None
