"""Find in one step the layers for which a tap computes the same weight gradients as the host.

The host computes this whole step. A tap on each layer computes the weight gradient as well. Both are compared when the
host's gradient arrives at the parameter. If they differ in a bit, the layer is left to the host from then on. They
differ if the gradient of the layer's input is taken twice, or if the layer's type computes another product. A layer is
also left to the host if its weight or its gradient is used elsewhere within a batch, or if its input or its output's
gradient is changed in the same backward without torch's notice. A gradient of zero proves nothing: the host computes
the layer until a later check proves it.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from tf_adapters.weight_gradients.reasons import (
    ANOTHER_GRADIENT,
    CHANGES,
    CHECK_FAILED,
    GRADIENT_READ,
    NOT_CALLED,
    OTHER_USES,
    SECOND_DERIVATIVE,
    TAKEN_AT_ONCE,
    UNPROVEN,
    WRITTEN_BY_POINTER,
)
from tf_adapters.weight_gradients.tap_function import Gradients, accumulates
from tf_adapters.weight_gradients.tapped_layer import TappedLayer, is_of_host

_SAMPLED = 4096
"""The most elements of a tensor that are compared to see whether it changes."""

_MOST_REACHED_BYTES = 2**28
"""The most bytes that a check holds longer than the host does, in one backward: a job may have no more memory."""

_Use = tuple[int | None, torch.Tensor]
"""A microbatch and a weight of a compiled block."""

_Place = tuple[int, torch.nn.Parameter]
"""A microbatch and a parameter."""


class _Uses(TorchFunctionMode):
    """Watches what functions of torch do with parameters.

    ``used`` is called with each parameter from which a result is computed that requires gradients, ``read`` with each
    whose ``.grad`` is read or set.
    """

    def __init__(self, used: Callable[[torch.Tensor], None], read: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._used, self._read = used, read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.grad:
            self._read(args[0])
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and isinstance(result, torch.Tensor) and result.requires_grad:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.nn.Parameter) and value is not result:
                    self._used(value)
        return result


class _Watched:
    """One call of a layer in the step that is checked: its gradients are added up for the comparison."""

    def __init__(
        self, check: TapCheck, layer: TappedLayer, parameters: Sequence[torch.nn.Parameter], microbatch: int
    ) -> None:
        self._check, self._layer, self._parameters, self._microbatch = check, layer, tuple(parameters), microbatch

    def second_derivative(self) -> None:
        self._check.not_understood(self._layer, SECOND_DERIVATIVE)

    def keep(self, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        self._check.reached(self._layer, inputs, gradient)
        try:
            with torch.no_grad():
                gradients = self._layer.gradients(self._parameters, inputs, gradient)
        except Exception:
            self._check.not_understood(self._layer, CHECK_FAILED)
        else:
            self._check.add(self._microbatch, self._parameters, gradients)

    def at_once(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Gradients:
        return ()

    def input_gradient(self, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError  # the host's own layer has the whole graph

    def with_graph(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Gradients:
        return ()


class TapCheck:
    """Watches one stage's layers in the step that is checked.

    Args:
        layers: by name of a parameter whose gradient passes the layer's tap.
    """

    def __init__(self, layers: Mapping[str, TappedLayer]) -> None:
        self._layers, self._watched = layers, frozenset(layers.values())
        self._inside: TappedLayer | None = None  # whose own forward runs
        self._sums: dict[_Place, torch.Tensor] = {}
        self._hooks: list[tuple[Any, Any, bool]] = []  # parameter, handle, whether it had no hook before
        self._samples: dict[torch.nn.Parameter, tuple[TappedLayer, torch.Tensor]] = {}
        self._reached: list[tuple[TappedLayer, torch.Tensor, int, torch.Tensor]] = []  # by the backward that runs
        self._reached_bytes = 0
        self._found: dict[tuple[TappedLayer, str], list[torch.Tensor | bool]] = {}  # whether a reason applies
        self._compared: defaultdict[TappedLayer, dict[str, list[torch.Tensor]]] = defaultdict(dict)
        self._trusted: set[TappedLayer] = set()
        self._called: set[TappedLayer] = set()
        self._uses: Counter[_Use] = Counter()
        self.kinds: defaultdict[TappedLayer, set[Hashable]] = defaultdict(set)
        self.microbatch: int | None = None

    def watches(self, layer: TappedLayer) -> bool:
        """Return whether the host computes this layer, for a comparison."""
        return layer in self._watched

    def watched(self, layer: TappedLayer, parameters: Sequence[torch.nn.Parameter], kind: Hashable) -> _Watched:
        """Compare the gradients of this call, which the host computes."""
        assert self.microbatch is not None
        for parameter in parameters:
            if parameter not in self._samples:
                self._hook(layer, parameter)
        self._note_call(layer, parameters)
        self.kinds[layer].add(kind)
        return _Watched(self, layer, parameters, self.microbatch)

    def begin_batch(self) -> None:
        """Drop what a batch that failed has left."""
        self._sums.clear()
        self._uses.clear()

    def add(self, microbatch: int, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        """Add a call's gradients, as the tap computes them."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            place = microbatch, parameter
            self._sums[place] = self._sums[place] + gradient if place in self._sums else gradient

    def reached(self, layer: TappedLayer, *tensors: torch.Tensor) -> None:
        """Note the values of what a tap would keep, to see at the end of the backward whether they have changed."""
        for tensor in tensors:
            self._reached_bytes += tensor.nbytes
            if self._reached_bytes > _MOST_REACHED_BYTES:
                return
            seen = tensor.detach()
            self._reached.append((layer, seen, seen._version, _sample(seen).clone()))

    @contextmanager
    def looking(self, microbatch: int) -> Iterator[None]:
        """Run a forward, a loss or a backward, and see which functions of torch use the layers' weights."""
        parameters = {
            id(getattr(layer.module, name)): layer for layer in set(self._layers.values()) for name in layer.names
        }

        def used(parameter: torch.Tensor) -> None:
            layer = parameters.get(id(parameter))
            if layer is not None and layer is not self._inside:
                self._note(layer, OTHER_USES, True)

        def read(parameter: torch.Tensor) -> None:
            layer = parameters.get(id(parameter))
            if layer is not None and _by_user():
                self._note(layer, GRADIENT_READ, True)

        before, self.microbatch = self.microbatch, microbatch
        try:
            with _Uses(used, read):
                yield
            for parameter, (layer, sample) in self._samples.items():
                if parameter.untyped_storage().size():  # FSDP frees the storage between two uses
                    self._note(layer, CHANGES, (_sample(parameter) != sample).any())
            self._look_for_changes()
        finally:
            self.microbatch = before
            self._reached.clear()
            self._reached_bytes = 0

    def _look_for_changes(self) -> None:
        """Note the layers whose input or output's gradient was changed by a pointer, since a tap reached it.

        Torch counts other changes, and they do not reach a kept tensor.
        """
        for layer, tensor, version, sample in self._reached:
            if tensor._version == version and tensor.untyped_storage().size():
                self._note(layer, WRITTEN_BY_POINTER, differs(sample, _sample(tensor)))

    @contextmanager
    def inside(self, layer: TappedLayer) -> Iterator[None]:
        """Run the layer's own computation, which may use its weight."""
        before, self._inside = self._inside, layer
        try:
            yield
        finally:
            self._inside = before

    def trust(self, layer: TappedLayer, parameters: Sequence[torch.nn.Parameter], kind: Hashable) -> None:
        """Note a call of ``layer``. Its gradients need no comparison: the host's own functions compute them."""
        self._note_call(layer, parameters)
        self._trusted.add(layer)
        self.kinds[layer].add(kind)

    def not_understood(self, layer: TappedLayer, reason: str) -> None:
        """Note a call of ``layer`` whose gradients a tap cannot compute."""
        self._called.add(layer)
        self._note(layer, reason, True)

    def has_seen(self, layer: TappedLayer, kind: Hashable) -> bool:
        """Return whether this check has seen a call of this kind of ``layer``."""
        return kind in self.kinds[layer]

    def note_use(self, weight: torch.Tensor) -> None:
        """Note that a compiled block computes with ``weight`` in the microbatch that runs."""
        self._uses[self.microbatch, weight] += 1

    def uses(self, weight: torch.Tensor) -> int:
        """Return how often compiled blocks have computed with ``weight`` in the microbatch that runs."""
        return self._uses[self.microbatch, weight]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Run a compiled function: a mode that watches would be compiled into its graph."""
        if torch._C._len_torch_function_stack():
            with _pop_mode_temporarily():
                yield
        else:
            yield

    def stop_watching(self) -> None:
        """Take our hooks from the parameters."""
        while self._hooks:
            parameter, handle, had_none = self._hooks.pop()
            handle.remove()
            if had_none:
                parameter._backward_hooks = None

    def end(self) -> dict[TappedLayer, str]:
        """Return why layers must be left to the host. Waits for the device."""
        self.stop_watching()
        found: dict[TappedLayer, str] = {}
        for (layer, reason), flags in self._found.items():
            if layer not in found and any(bool(flag) for flag in flags):
                found[layer] = reason
        for layer in self._layers.values():
            if layer not in self._called:
                found.setdefault(layer, NOT_CALLED)
            elif not self._is_proven(layer):
                found.setdefault(layer, UNPROVEN)
        return found

    def _is_proven(self, layer: TappedLayer) -> bool:
        """Return whether each parameter of the layer had a gradient that was not zero, and was compared."""
        if layer in self._trusted:
            return True
        compared = self._compared[layer].values()
        return bool(compared) and all(any(bool(flag) for flag in flags) for flags in compared)

    def _note_call(self, layer: TappedLayer, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._called.add(layer)
        for parameter in parameters:
            if parameter not in self._samples:
                self._samples[parameter] = layer, _sample(parameter).clone()

    def _hook(self, layer: TappedLayer, parameter: torch.nn.Parameter) -> None:
        """Compare each gradient that arrives at ``parameter`` with the tap's."""
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        name = next(name for name in layer.names if getattr(layer.module, name) is parameter)
        flags = self._compared[layer].setdefault(name, [])

        @torch.no_grad()
        def compare(gradient: torch.Tensor | None) -> None:
            if self.microbatch is None or gradient is None:
                return
            if not accumulates(node):
                self._note(layer, TAKEN_AT_ONCE, True)
                return
            ours = self._sums.pop((self.microbatch, parameter), None)
            if getattr(parameter, "grad_added_to_main_grad", False):
                # A fused kernel has accumulated the gradient already. This one is a dummy, and nothing can be compared.
                if ours is not None:
                    flags.append((ours != 0).any())
            elif ours is None:
                self._note(layer, OTHER_USES, gradient.count_nonzero() > 0)
            else:
                self._note(layer, ANOTHER_GRADIENT, differs(ours, gradient))
                flags.append((gradient != 0).any())

        had_none = parameter._backward_hooks is None
        handle = parameter.register_hook(compare)  # type: ignore[no-untyped-call]
        hooks: Any = parameter._backward_hooks
        others = [(key, hooks.pop(key)) for key in list(hooks) if key != handle.id]
        hooks.update(others)  # after ours: a host's hooks may change the gradient
        self._hooks.append((parameter, handle, had_none))

    def _note(self, layer: TappedLayer, reason: str, flag: torch.Tensor | bool) -> None:
        self._found.setdefault((layer, reason), []).append(flag)


def _by_user() -> bool:
    """Return whether code of the user's has called the function of torch that runs, not a host or torch itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if is_of_host(module):
            return False
        if module != "torch" and not module.startswith("torch."):
            return True
        frame = frame.f_back
    return False


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLED)] if flat.numel() else flat


def differs(ours: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | bool:
    """Return whether two gradients differ in any bit."""
    if ours.shape != gradient.shape or ours.dtype != gradient.dtype:
        return True
    return ((ours != gradient) & ~(ours.isnan() & gradient.isnan())).any()
