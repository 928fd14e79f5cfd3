"""Find in one step the layers for which a tap computes the same weight gradients as the host.

The host computes this whole step, and no layer is tapped. For each call of a layer that has a tap, the tap's weight
gradient is computed as well. Both are compared when the host's gradient arrives at the parameter. If they differ in a
bit, the layer is left to the host from then on. They differ if the gradient of the layer's input is taken twice, or if
the layer's type computes another product. A layer is also left to the host if its weight is used outside of its own
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from tf_adapters.weight_gradients.taps import TappedLayer

ANOTHER_GRADIENT = "its weight gradient is not the product that a tap computes"
OTHER_USES = "its weight is used outside of its own forward"
NOT_CALLED = "its forward did not run in the first step"
NOT_PLAIN = "it is called inside torch.func, or with complex, nested, sparse, distributed or not contiguous tensors"
QUANTIZED = "it computes in MXFP8, FP4 or by a recipe of its own, where taps have not been tested"
NO_ROWS = "it computes in FP8 or FP4, where tokens cannot be sampled"
SPECIAL_WEIGHT = "its weight is no ordinary tensor: it is sharded, or kept in FP8"
CHANGES = "its weight changes within a batch, as where an optimizer steps inside the backward"

_SAMPLED = 4096
"""The most elements of a parameter that are compared to see whether it changes."""

_Place = tuple[int, torch.nn.Parameter]
"""A microbatch and a parameter."""


def accumulates(node: Any) -> bool:
    """Return whether the running backward accumulates into the leaf of this AccumulateGrad ``node``.

    ``torch.autograd.grad`` does not, nor does a backward that names its inputs.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad for this leaf
        return False


class _Uses(TorchFunctionMode):
    """Calls ``used`` with each parameter from which a function of torch computes a result that requires gradients."""

    def __init__(self, used: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._used = used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and isinstance(result, torch.Tensor) and result.requires_grad:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.nn.Parameter) and value is not result:
                    self._used(value)
        return result


class TapCheck:
    """Watches one stage's layers in the step that is checked.

    Args:
        layers: by name of a parameter whose gradient passes the layer's tap.
    """

    def __init__(self, layers: Mapping[str, TappedLayer]) -> None:
        self._layers = layers
        self._inside: TappedLayer | None = None  # whose own forward runs
        self._sums: dict[_Place, torch.Tensor] = {}
        self._hooks: list[tuple[Any, Any, bool]] = []  # parameter, handle, whether it had no hook before
        self._samples: dict[torch.nn.Parameter, tuple[TappedLayer, torch.Tensor]] = {}
        self._found: dict[tuple[TappedLayer, str], list[torch.Tensor | bool]] = {}  # whether a reason applies
        self._called: set[TappedLayer] = set()
        self.microbatch: int | None = None

    def watch(
        self, layer: TappedLayer, inputs: torch.Tensor, output: Any, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Compare the gradients of this call, in which the host's own computation has returned ``output``."""
        microbatch, kept = self.microbatch, inputs.detach()
        assert microbatch is not None
        for parameter in parameters:
            if parameter not in self._samples:
                self._hook(layer, parameter)
        self.trust(layer, parameters)
        node = torch.autograd.graph.get_gradient_edge(parameters[0]).node

        @torch.no_grad()
        def add(gradient: torch.Tensor) -> None:
            if accumulates(node):
                for p, of_call in zip(parameters, layer.gradients(tuple(parameters), kept, gradient), strict=True):
                    place = microbatch, p
                    self._sums[place] = self._sums[place] + of_call if place in self._sums else of_call

        output.register_hook(add)

    @contextmanager
    def looking(self, microbatch: int) -> Iterator[None]:
        """Run a forward or a backward, and see which functions of torch use the layers' weights."""
        parameters = {
            id(getattr(layer.module, name)): layer for layer in set(self._layers.values()) for name in layer.names
        }

        def used(parameter: torch.Tensor) -> None:
            layer = parameters.get(id(parameter))
            if layer is not None and layer is not self._inside:
                self._note(layer, OTHER_USES, True)

        self.microbatch = microbatch
        try:
            with _Uses(used):
                yield
            for parameter, (layer, before) in self._samples.items():
                if parameter.untyped_storage().size():  # FSDP frees the storage between two uses
                    self._note(layer, CHANGES, (_sample(parameter) != before).any())
        finally:
            self.microbatch = None

    @contextmanager
    def inside(self, layer: TappedLayer) -> Iterator[None]:
        """Run the layer's own computation, which may use its weight."""
        before, self._inside = self._inside, layer
        try:
            yield
        finally:
            self._inside = before

    def trust(self, layer: TappedLayer, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Note a call of ``layer``. Its gradients need no comparison if the host's own functions compute them."""
        self._called.add(layer)
        for parameter in parameters:
            if parameter not in self._samples:
                self._samples[parameter] = layer, _sample(parameter).clone()

    def not_understood(self, layer: TappedLayer, reason: str) -> None:
        """Note a call of ``layer`` whose gradients a tap cannot compute."""
        self._called.add(layer)
        self._note(layer, reason, True)

    def end(self) -> dict[str, str]:
        """End the step. Return why layers must be left to the host, by name of their parameters.

        Waits for the device.
        """
        while self._hooks:
            parameter, handle, had_none = self._hooks.pop()
            handle.remove()
            if had_none:
                parameter._backward_hooks = None
        found = {layer: NOT_CALLED for layer in self._layers.values() if layer not in self._called}
        for (layer, reason), flags in self._found.items():
            if layer not in found and any(bool(flag) for flag in flags):
                found[layer] = reason
        return {name: found[layer] for name, layer in self._layers.items() if layer in found}

    def _hook(self, layer: TappedLayer, parameter: torch.nn.Parameter) -> None:
        """Compare each gradient that arrives at ``parameter`` with the tap's."""

        @torch.no_grad()
        def compare(gradient: torch.Tensor) -> None:
            if self.microbatch is None or getattr(parameter, "grad_added_to_main_grad", False):
                return  # a fused kernel has accumulated the gradient already: this one is a dummy
            ours = self._sums.pop((self.microbatch, parameter), None)
            if ours is None:
                self._note(layer, OTHER_USES, gradient.count_nonzero() > 0)
            else:
                self._note(layer, ANOTHER_GRADIENT, _differs(ours, gradient))

        had_none = parameter._backward_hooks is None
        handle = parameter.register_hook(compare)  # type: ignore[no-untyped-call]
        hooks: Any = parameter._backward_hooks
        others = [(key, hooks.pop(key)) for key in list(hooks) if key != handle.id]
        hooks.update(others)  # after ours: a user's hooks may change the gradient
        self._hooks.append((parameter, handle, had_none))

    def _note(self, layer: TappedLayer, reason: str, flag: torch.Tensor | bool) -> None:
        self._found.setdefault((layer, reason), []).append(flag)


def _sample(parameter: torch.nn.Parameter) -> torch.Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLED)] if flat.numel() else flat


def _differs(ours: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | bool:
    """Return whether two gradients differ in any bit."""
    if ours.shape != gradient.shape or ours.dtype != gradient.dtype:
        return True
    return ((ours != gradient) & ~(ours.isnan() & gradient.isnan())).any()
