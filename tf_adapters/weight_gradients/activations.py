"""Make activations require gradients under a mask if they require them without one.

A module's output has no autograd graph if the module's parameters are all frozen and its input needs no gradient. This
happens to an embedding, the first layer or a learned bias. The host's model may rely on the graph that the output has
without a mask: for hooks on activations, branches with their own gradient, or reentrant checkpointing. Such an output
therefore gets a graph of one node, which passes no gradient on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tf_adapters.weight_gradients.parameters import any_compiled
from tf_adapters.weight_gradients.tapped_layer import transforms_run


class _Requiring(torch.autograd.Function):
    """The same values, which require gradients. The backward discards their gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, None]:
        return None, None


class ActivationGraphs:
    """Keeps the graphs of activations of one stage, ``model``, while parameters of it are frozen.

    It sets nothing on a module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._anchor = torch.zeros(0, requires_grad=True)
        self._owners = _owners(model)
        self._is_compiled = any_compiled([model])  # a hook would compile its layers again
        self._known: dict[torch.nn.Module, tuple[bool, ...]] = {}  # which of several outputs require gradients

    def learned(self) -> AbstractContextManager[None]:
        """Run a forward that freezes nothing, and see which of a module's outputs require gradients in the host."""
        self._is_compiled = any_compiled([self._model])  # it may have been compiled since
        return self._looking(self._learn)

    def kept(self, ends: bool) -> AbstractContextManager[None]:
        """Run a forward or a backward under a mask. With ``ends``, the stage's output requires no gradient.

        ``ends`` is true if the mask freezes all of the first stage: its backward then has nothing to compute.
        """
        return self._looking(self._end if ends else self._keep)

    def required(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same values, which require gradients if they are floating-point or complex."""
        if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        return _Requiring.apply(tensor, self._anchor)  # type: ignore[no-any-return, no-untyped-call]

    @contextmanager
    def _looking(self, look: Callable[[torch.nn.Module, Any], Any]) -> Iterator[None]:
        """Call ``look`` with each module that owns parameters and with its output, which it may replace."""
        if self._is_compiled:
            yield
            return

        def hook(module: torch.nn.Module, _: Any, output: Any) -> Any:
            plain = torch.is_grad_enabled() and not transforms_run()
            return look(module, output) if plain and (module in self._owners or module is self._model) else None

        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def _learn(self, module: torch.nn.Module, output: Any) -> None:
        if not torch.is_tensor(output):
            self._known[module] = tuple(leaf.requires_grad for leaf in _tensors(output))

    def _end(self, module: torch.nn.Module, output: Any) -> Any:
        kept = self._keep(module, output)
        if module is not self._model:
            return kept
        return tree_map_only(torch.Tensor, torch.Tensor.detach, output if kept is None else kept)

    def _keep(self, module: torch.nn.Module, output: Any) -> Any:
        if all(getattr(holder, name).requires_grad for holder, name in self._owners.get(module, ())):
            return None
        if torch.is_tensor(output):
            return self.required(output)
        tensors = _tensors(output)
        wanted = self._known.get(module, ())
        if len(wanted) != len(tensors) or all(t.requires_grad for t, w in zip(tensors, wanted, strict=True) if w):
            return None
        of_output = iter(wanted)
        return tree_map_only(torch.Tensor, lambda t: self.required(t) if next(of_output) else t, output)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _owners(model: torch.nn.Module) -> dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]]:
    """Return the modules that own trainable parameters themselves, with these parameters' holders and names.

    The parameters of a parametrization belong to the module whose weight it computes: that weight is no activation.
    """
    owners: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        trainable = [(module, name) for name, p in module.named_parameters(recurse=False) if p.requires_grad]
        if trainable:
            parts = prefix.split(".")
            cut = parts.index("parametrizations") if "parametrizations" in parts else len(parts)
            owners.setdefault(model.get_submodule(".".join(parts[:cut])), []).extend(trainable)
    return owners
