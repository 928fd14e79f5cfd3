"""Layers that torch.compile has compiled: a second graph with taps inside, beside the host's own.

A compiled block has two graphs: the host's, and ours, compiled by the same compiler from the block's twin. Ours runs
where a microbatch is recorded, the layers of the block are proven, and the call is of a kind that has been proven.
All other calls run the host's graph: evaluation, warm-up, control steps, and calls with other shapes. Both graphs are
compiled in the first step, which also compares them (``compiled_check``).
Source: torch/_dynamo/eval_frame.py (``OptimizedModule``), torch/nn/modules/module.py (``_compiled_call_impl``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._pytree import tree_leaves

from tf_adapters.weight_gradients.compiled_check import Product, compare, uses
from tf_adapters.weight_gradients.compiled_names import asked_for, collected, run_named
from tf_adapters.weight_gradients.compiled_tap import ANCHOR, CompiledLinear, operator
from tf_adapters.weight_gradients.kept import Kept
from tf_adapters.weight_gradients.parameters import compiled_module, is_compiled
from tf_adapters.weight_gradients.reasons import CHECK_FAILED, HAS_STATE, OTHER_USES, TAKEN_AT_ONCE, USERS_HOOK
from tf_adapters.weight_gradients.stand_ins import around_backwards
from tf_adapters.weight_gradients.tap_function import accumulates, hand_over
from tf_adapters.weight_gradients.tapped_layer import (
    Check,
    LinearTap,
    Parameters,
    TappedLayer,
    Taps,
    autocast_type,
    has_users_hook,
    keep_product,
    linear_gradient,
    transforms_run,
)
from tf_adapters.weight_gradients.twins import Twin, shared

MakeLayer = Callable[[torch.nn.Module], TappedLayer | None]
_Place = tuple[int, int]
"""A tensor's storage, and the tensor's offset in it."""

_layers: WeakValueDictionary[_Place, CompiledLayer] = WeakValueDictionary()


class CompiledLayer(LinearTap):
    """A linear layer inside a compiled block."""

    block: CompiledBlock

    def install(self, taps: Taps) -> None:
        """The block is installed instead."""

    def remove(self) -> None:
        """The block is removed instead."""

    @property
    def weight(self) -> Any:
        return self.module._parameters["weight"]


class CompiledPart:
    """A compiled module that has no taps: it runs as the host compiled it, also while a check watches the host."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._owner, self._inside = module, inside(module)
        self._attribute = "_compiled_call_impl" if self._inside is module else "forward"
        self._host: Callable[..., Any] = vars(module)[self._attribute]
        self._taps: Taps | None = None

    def install(self, taps: Taps) -> None:
        if self._taps is None:
            self._taps = taps
            vars(self._owner)[self._attribute] = self._run

    def remove(self) -> None:
        self._taps = None
        if vars(self._owner).get(self._attribute) == self._run:
            vars(self._owner)[self._attribute] = self._host

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._taps is None or self._taps.check is None:
            return self._host(*args, **kwargs)
        with self._taps.check.unwatched():
            return self._host(*args, **kwargs)


class CompiledBlock(CompiledPart):
    """A compiled module whose ``layers`` are tapped together or not at all."""

    def __init__(self, module: torch.nn.Module, layers: Sequence[CompiledLayer]) -> None:
        super().__init__(module)
        self.layers = tuple(layers)
        self._replayed: list[Product] | None = None  # in a replay of the check
        self._twin = Twin(self._inside, {id(layer.module): shared(CompiledLinear, layer.module) for layer in layers})
        self._tapped: Callable[..., Any] = _compiler(module)(_entry(type(self._inside)))
        for layer in self.layers:
            layer.block = self

    @property
    def is_replayed(self) -> bool:
        """Return whether the check runs one of the graphs now."""
        return self._replayed is not None

    # --- a call of the block ---------------------------------------------------------------------------------

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block: the host's graph, or ours."""
        taps = self._taps
        if taps is None or taps.microbatch is None or not torch.is_grad_enabled():
            return self._host(*args, **kwargs)
        kind, check = self._kind(args, kwargs), taps.check
        if check is None:
            return self._graph(taps, kind)(*args, **kwargs)
        watched = any(map(check.watches, self.layers))
        if watched:
            self._check(check, kind, partial(self._host, *args, **kwargs))
        with check.unwatched():  # a mode would be compiled into the graph
            return (self._host if watched else self._graph(taps, kind))(*args, **kwargs)

    def _graph(self, taps: Taps, kind: Hashable) -> Callable[..., Any]:
        """Return the graph that computes a call."""
        weights = self._weights()
        if not weights or not all(taps.taps(layer, kind) for layer in self.layers):
            return self._host
        if not self._twin.follow():
            taps.surprised(self.layers[0], HAS_STATE)
            return self._host
        taps.called(weights)
        return self._ours

    def _ours(self, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            _layers[_place(layer.weight)] = layer
        return self._tapped(self._twin.module, *args, **kwargs)

    def _weights(self) -> Parameters:
        """Return the weights of all layers, if a tap can compute all of their gradients now; else nothing."""
        weights = tuple(layer.weight for layer in self.layers)
        plain = all(isinstance(weight, torch.nn.Parameter) and weight.requires_grad for weight in weights)
        return weights if plain and not has_users_hook(weights) and not transforms_run() else ()

    def _kind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
        """Return what a graph may depend on besides values."""
        seen = map(_described, tree_leaves((args, kwargs)))
        return self._owner.training, autocast_type(self.layers[0].weight), *seen

    # --- the check -------------------------------------------------------------------------------------------

    def _check(self, check: Check, kind: Hashable, call: partial[Any]) -> None:
        """Run both graphs on copies of the call's arguments, unless the check has seen this kind of call."""
        weights = self._weights()
        reason = None if weights else USERS_HOOK
        if weights and not check.has_seen(self.layers[0], kind):
            with check.unwatched():
                reason = self._compared(call)
        for layer in self.layers:
            if reason is None:
                check.trust(layer, (layer.weight,), kind)
                check.note_use(layer.weight)
            else:
                check.not_understood(layer, reason)

    def _compared(self, call: partial[Any]) -> str | None:
        self._replayed = []
        try:
            if not self._twin.follow():
                return HAS_STATE
            layers = {layer.weight: layer for layer in self.layers}
            reason = compare(self._inside, call, ours=self._ours, products=self._replayed, weights=layers)
            return HAS_STATE if reason is None and self._twin.has_state() else reason
        except Exception:
            return CHECK_FAILED
        finally:
            self._replayed = None

    # --- a backward of our graph -----------------------------------------------------------------------------

    def keep(self, layer: CompiledLayer, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep what the weight gradient of ``layer`` needs, if the backward that runs accumulates it."""
        weight, taps = layer.weight, self._taps
        if self._replayed is not None:
            self._replayed.append(Product(weight, Kept(inputs), Kept(gradient)))
            return
        if collected(weight, inputs, gradient) or not accumulates(torch.autograd.graph.get_gradient_edge(ANCHOR).node):
            return
        if taps is None or taps.microbatch is None:
            hand_over([linear_gradient(weight, inputs, gradient)], weight)
            return
        kept = Kept(inputs), Kept(gradient)
        keep_product(taps, taps.microbatch, layer, parameters=(weight,), kept=kept)


class CompiledParts:
    """The compiled modules of one stage. ``make`` returns the tap that a layer would have if it were not compiled."""

    def __init__(self, model: torch.nn.Module, make: MakeLayer) -> None:
        self._parts: list[CompiledPart] = []
        self.layers: dict[torch.nn.Module, CompiledLayer | None] = {}  # inside them, with their taps
        for module in model.modules():
            if is_compiled(module) and module not in self.layers:
                self.layers |= dict.fromkeys(module.modules())
                self._parts.append(_part(module, make))
        self._blocks = [part for part in self._parts if isinstance(part, CompiledBlock)]
        self._layers = [layer for block in self._blocks for layer in block.layers]
        self.layers |= {layer.module: layer for layer in self._layers}

    def are_others(self, model: torch.nn.Module) -> bool:
        """Return whether other parts of the model are compiled now."""
        return any(is_compiled(module) and module not in self.layers for module in model.modules())

    def install(self, taps: Taps) -> None:
        for part in self._parts:
            part.install(taps)

    def remove(self) -> None:
        for part in self._parts:
            part.remove()

    def around(self, taps: Taps) -> AbstractContextManager[None]:
        """Run a part of a microbatch inside, in which other code may ask for the gradients of weights."""
        return around_backwards(partial(self._backward, taps)) if self._layers else nullcontext()

    def _backward(self, taps: Taps, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch._guards.TracingContext.try_get() is not None or any(block.is_replayed for block in self._blocks):
            return run(*args, **kwargs)  # a compiler traces a backward, or the check runs one
        layers = {layer.weight: layer for layer in self._layers}
        if taps.check is not None:
            _look_for_uses(taps.check, args[0], layers)
        asked = asked_for(layers, args)
        if not asked:
            return run(*args, **kwargs)
        for weight in asked:
            if taps.check is not None:
                taps.check.not_understood(layers[weight], TAKEN_AT_ONCE)
            taps.asked_by_name(layers[weight])
        return run_named(run, asked, args, kwargs)


def _look_for_uses(check: Check, roots: Sequence[torch.Tensor], layers: Mapping[torch.Tensor, CompiledLayer]) -> None:
    """Note the layers whose weight is used outside of their blocks."""
    watched = {weight: layer for weight, layer in layers.items() if check.watches(layer)}
    for weight, count in uses(roots, watched).items():
        if count > check.uses(weight):
            check.not_understood(watched[weight], OTHER_USES)


@torch.no_grad()
def _route(inputs: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> None:
    """Give a product to the layer of its weight."""
    layer = _layers.get(_place(weight))
    if layer is None:
        raise RuntimeError("the weight of a compiled layer has moved in memory between its forward and its backward")
    layer.block.keep(layer, inputs, gradient)


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _described(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.requires_grad
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    kind: type = type(value)
    return kind


def _entry(kind: type) -> Callable[..., Any]:
    """Return a function that calls a module. Each class has its own, with versions that count by themselves.

    Torch limits the compiled versions of one function.
    """
    code = _call.__code__.replace(co_name=f"tapped_{kind.__name__}")
    return FunctionType(code, _call.__globals__, code.co_name)


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def inside(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that was compiled: ``torch.compile`` wraps it, ``module.compile()`` does not."""
    return compiled_module(module) or module


def _part(module: torch.nn.Module, make: MakeLayer) -> CompiledPart:
    """Return the block that a compiled module becomes, or a part without taps if it cannot have any."""
    compiler, parts = _compiler(module), list(inside(module).modules())
    if compiler is None or operator(_route) is None or _captures_graphs(compiler) or any(map(_is_sharded, parts)):
        return CompiledPart(module)
    alone = (part for part in parts if vars(part).get("_compiled_call_impl") is None)
    layers = [CompiledLayer(part) for part in alone if type(make(part)) is LinearTap]
    return CompiledBlock(module, layers) if layers else CompiledPart(module)


def _compiler(module: torch.nn.Module) -> Any:
    """Return what compiles a function as this module was compiled; None if it cannot be found."""
    if compiled_module(module) is not None:
        return vars(module).get("dynamo_ctx")
    cells = getattr(vars(module).get("_compiled_call_impl"), "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells]
    return next((thing for thing in held if type(thing).__name__ == "OptimizeContext"), None)


def _captures_graphs(compiler: Any) -> bool:
    """Return whether CUDA graphs run the compiled code: they would overwrite what a tap keeps."""
    backend, settings = compiler.callback, compiler.compiler_config or {}
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return "cudagraph" in str(getattr(backend, "__name__", "")) or bool(settings.get("triton.cudagraphs"))


def _is_sharded(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
