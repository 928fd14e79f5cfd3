"""Finds the layers whose weight gradients a tap computes as the host does, in one step that computes as the host.

No layer is tapped in the step that is checked. For each call of a layer that has a tap, the tap's weight gradient is
computed next to the host's own. Both are compared when the host's gradient arrives at the parameter. A layer whose
gradients differ is left to the host from then on. That happens where its weight is used outside of its own forward,
where the gradient of its input is differentiated once more, or where its type computes another product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tf_adapters.masking.taps import TappedLayer

__all__ = ["ANOTHER_GRADIENT", "CHANGES", "NOT_CALLED", "NOT_PLAIN", "OTHER_USES", "TapCheck", "accumulates"]

ANOTHER_GRADIENT = "its weight gradient is not the product that a tap computes"
OTHER_USES = "its weight is used outside of its own forward"
NOT_CALLED = "its forward did not run in the first step"
NOT_PLAIN = "it is called inside torch.func, or with complex, nested, sparse or distributed tensors"
CHANGES = "its weight changes within a batch, as where an optimizer steps inside the backward"

_SAMPLED = 4096
"""Elements of a parameter, at most, that are compared to see whether it changes."""

_Place = tuple[int, torch.nn.Parameter]
"""A microbatch and a parameter."""


def accumulates(node: Any) -> bool:
    """Whether the backward that runs accumulates into the leaf of this AccumulateGrad ``node``.

    ``torch.autograd.grad`` does not, nor a backward that names its inputs.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad for this leaf
        return False


class TapCheck:
    """Watches the calls of one stage's layers in the step that is checked."""

    def __init__(self) -> None:
        self._sums: dict[_Place, torch.Tensor] = {}
        self._hooked: set[torch.nn.Parameter] = set()
        self._hooks: list[tuple[Any, Any, bool]] = []  # parameter, handle, whether it had no hook before
        self._samples: dict[torch.nn.Parameter, tuple[TappedLayer, torch.Tensor]] = {}
        self._differ: dict[tuple[TappedLayer, str], list[torch.Tensor | bool]] = {}
        self._called: set[TappedLayer] = set()
        self.microbatch: int | None = None

    def watch(
        self, layer: TappedLayer, inputs: torch.Tensor, output: Any, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """A call of ``layer`` with these ``inputs`` has given ``output``, by the host's own computation."""
        self._called.add(layer)
        microbatch, kept = self.microbatch, inputs.detach()
        assert microbatch is not None
        for parameter in parameters:
            if parameter not in self._hooked:
                self._hooked.add(parameter)
                self._hook(parameter, self._compare(layer, parameter))
                self._samples[parameter] = layer, _sample(parameter).clone()
        node = torch.autograd.graph.get_gradient_edge(parameters[0]).node

        @torch.no_grad()
        def add(gradient: torch.Tensor) -> None:
            if accumulates(node):
                for p, of_call in zip(parameters, layer.gradients(tuple(parameters), kept, gradient), strict=True):
                    place = microbatch, p
                    self._sums[place] = self._sums[place] + of_call if place in self._sums else of_call

        output.register_hook(add)

    def not_plain(self, layer: TappedLayer) -> None:
        """A call of ``layer`` is not one that a tap understands."""
        self._called.add(layer)
        self._note(layer, NOT_PLAIN, True)

    def look_for_changes(self) -> None:
        """Compare the watched parameters' values with those that the step began with."""
        for parameter, (layer, before) in self._samples.items():
            if parameter.untyped_storage().size():  # FSDP gives its storage up between two uses
                self._note(layer, CHANGES, (_sample(parameter) != before).any())

    def end(self, layers: Iterable[TappedLayer]) -> dict[TappedLayer, str]:
        """The step has ended: which of the ``layers`` are to be left to the host, and why. Waits for the device."""
        while self._hooks:
            parameter, handle, had_none = self._hooks.pop()
            handle.remove()
            if had_none:
                parameter._backward_hooks = None
        found = {layer: NOT_CALLED for layer in layers if layer not in self._called}
        for (layer, reason), flags in self._differ.items():
            if layer not in found and any(bool(flag) for flag in flags):
                found[layer] = reason
        return found

    def _hook(self, parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        had_none = parameter._backward_hooks is None
        handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        hooks: Any = parameter._backward_hooks
        others = [(key, hooks.pop(key)) for key in list(hooks) if key != handle.id]
        hooks.update(others)  # after ours: hooks of the user's may change the gradient
        self._hooks.append((parameter, handle, had_none))

    def _compare(self, layer: TappedLayer, parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        @torch.no_grad()
        def compare(gradient: torch.Tensor) -> None:
            if self.microbatch is None or getattr(parameter, "grad_added_to_main_grad", False):
                return  # a fused kernel has accumulated it already: this one is a dummy
            ours = self._sums.pop((self.microbatch, parameter), None)
            if ours is None:
                self._note(layer, OTHER_USES, gradient.count_nonzero() > 0)
            else:
                self._note(layer, ANOTHER_GRADIENT, _differs(ours, gradient))

        return compare

    def _note(self, layer: TappedLayer, reason: str, flag: torch.Tensor | bool) -> None:
        self._differ.setdefault((layer, reason), []).append(flag)


def _sample(parameter: torch.nn.Parameter) -> torch.Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLED)] if flat.numel() else flat


def _differs(ours: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | bool:
    """Whether two gradients differ by more than the rounding of sums. What is not finite tells nothing."""
    if ours.shape != gradient.shape or ours.dtype != gradient.dtype:
        return True
    wide = torch.promote_types(gradient.dtype, torch.float32)
    difference, size = (torch.linalg.vector_norm(values, dtype=wide) for values in (ours - gradient, gradient))
    tolerance = torch.finfo(gradient.dtype).eps ** 0.5
    differs: torch.Tensor = (difference > tolerance * size) & torch.isfinite(size)
    return differs


def by_name(found: Mapping[TappedLayer, str], names: Mapping[str, TappedLayer]) -> dict[str, str]:
    """Why layers are left to the host, by the model's names of their parameters."""
    return {name: found[layer] for name, layer in names.items() if layer in found}
