"""One model chunk of this rank: its stage, its parameters, and what masking it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tf_adapters.megatron.ddp import FrozenGradients
from tf_adapters.selection.masks import NOTHING_FROZEN, Mask


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
        embedding = getattr(self.model, "embedding", None)  # of a first stage
        if isinstance(embedding, torch.nn.Module) and config.recompute_granularity is not None:
            self._hooks.append(embedding.register_forward_hook(self._keep_gradients))

    def close(self) -> None:
        """Take our hooks off the model."""
        self.gradients.remove()
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def masked(self, mask: Mask) -> Iterator[None]:
        """Around a forward or backward under ``mask``, for what Megatron must not stumble over."""
        self._mask = mask
        try:
            with self.gradients.hidden(mask.names):
                yield
        finally:
            self._mask = NOTHING_FROZEN

    def _keep_gradients(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Recomputed segments pass gradients only if their input needs one.

        Behind a frozen embedding, whether we froze it or the user, it does not, and the whole stage would lose its
        gradients without a word.
        """
        tensors = output if isinstance(output, tuple) else (output,)
        for tensor in tensors:
            if not self._mask.complete and torch.is_grad_enabled() and _needs_none(tensor):
                tensor.requires_grad_()


def innermost(module: Any) -> torch.nn.Module:
    """The model inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    return module  # type: ignore[no-any-return]


def _needs_none(tensor: Any) -> bool:
    return torch.is_tensor(tensor) and tensor.is_floating_point() and not tensor.requires_grad
