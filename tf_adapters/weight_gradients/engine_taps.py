"""Taps on Transformer Engine's layers: their own functions compute the weight gradients later.

In the backward, each module asks its ``wgrad_store`` whether the weight gradient is deferred. If so, the module gives
the store the tensors and the function that computes the gradient. Each recorded call gets its own store. It also gets
aliases of the parameters, so that the backward passes no gradient to the parameters themselves: for a deferred gradient
a module returns None, a dummy, or (GroupedLinear) tensors without values. The parameter's hooks see the real gradient
once it is computed.
Source: transformer_engine/pytorch/module/ (2.3 and newer).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tf_adapters.weight_gradients.kept import Kept
from tf_adapters.weight_gradients.reasons import NO_ROWS, NOT_PLAIN, QUANTIZED, SPECIAL_WEIGHT, USERS_HOOK
from tf_adapters.weight_gradients.tap_function import accumulates
from tf_adapters.weight_gradients.tapped_layer import (
    Check,
    Choose,
    Parameters,
    TappedLayer,
    Taps,
    has_users_hook,
    plain_layer,
    transforms_run,
)

_ENGINE = "transformer_engine.pytorch"
_OWN = ("transformer_engine.", "megatron.core.extensions.transformer_engine")
"""The modules whose classes can have a tap; a user's subclass may do anything with its weight."""

_RECIPES = ("delayed", "float8_current_scaling", "float8_block_scaling")
"""Methods of an FP8 recipe. If one of them is true, deferral gave the host's bits on a GPU with this recipe."""

Finish = Callable[[Sequence[Any]], None]


class _Aliases(torch.autograd.Function):
    """The parameters' values, unchanged. The backward passes their gradients to ``finish``, None for a missing one."""

    @staticmethod
    def forward(ctx: Any, finish: Finish, anchor: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.finish = finish
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
        if accumulates(ctx.next_functions[0][0]):
            ctx.finish(gradients)
        return (None,) * (2 + len(gradients))


class _Task(NamedTuple):
    """A deferred function of a module, what it reads, and its other arguments."""

    kept: list[Any]
    others: list[Any]
    function: Callable[..., Any]

    @property
    def tensors(self) -> list[Any]:
        return [*map(_tensors, self.kept), *self.others]


def _tensors(kept: Any) -> Any:
    if isinstance(kept, list):
        return [_tensors(part) for part in kept]
    return kept.tensor if isinstance(kept, Kept) else kept


class _Store:
    """Replaces a module's ``wgrad_store`` in one call."""

    def __init__(self) -> None:
        self.tasks: list[_Task] = []
        self.kept: list[Kept] = []
        self.aliases: dict[str, Any] = {}  # the module has only weak references to them

    def delay_wgrad_compute(self) -> bool:
        return True

    def put(self, tensors: Sequence[Any], function: Callable[..., Any]) -> None:
        """Take a deferred function. Of its ``tensors`` the first two are inputs and output gradients."""
        self.tasks.append(_Task([self._keep(tensor) for tensor in tensors[:2]], list(tensors[2:]), function))

    def _keep(self, tensor: Any) -> Any:
        if isinstance(tensor, (list, tuple)):
            return [self._keep(part) for part in tensor]
        if type(tensor) is not torch.Tensor:  # quantized: the module has just made it, and nobody else has it
            return tensor
        self.kept.append(Kept(tensor))
        return self.kept[-1]


class EngineTap(TappedLayer):
    """A layer of Transformer Engine.

    ``products`` are the names of the weight and the bias of each product, in the order of the backward. A ``grouped``
    layer has one function for all of its products. If tokens are ``sampled``, the host computes calls in FP8 or FP4.
    """

    def __init__(
        self, module: torch.nn.Module, products: Sequence[tuple[str, ...]], grouped: bool, sampled: bool
    ) -> None:
        super().__init__(module, tuple(name for product in products for name in product))
        self._products, self._grouped, self._sampled = products, grouped, sampled
        self._weights = [product[0] for product in products]

    def gradients(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError  # the module's own functions compute them

    def training(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Parameters:
        trained = self._trained()
        return tuple(trained.values()) if not trained.keys().isdisjoint(self._weights) else ()

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        own = self.module._parameters
        return {name: p for name in self.names if (p := own.get(name)) is not None and p.requires_grad}

    def watched(self, taps: Taps, check: Check, call: partial[Any], output: Any, parameters: Parameters) -> Any:
        check.trust(self, parameters, self.kind(self._input_of(call)))
        return output

    def kind(self, inputs: Any) -> Hashable:
        """Return the same for all inputs: the module's own functions know what they compute."""
        return ()

    def reason_against(self, call: partial[Any], parameters: Sequence[torch.nn.Parameter]) -> str | None:
        if has_users_hook(parameters):
            return USERS_HOOK
        if transforms_run():
            return NOT_PLAIN
        if not all(type(parameter) is torch.nn.Parameter and parameter.is_leaf for parameter in parameters):
            return SPECIAL_WEIGHT
        recipe = _recipe()
        if recipe is None:
            return None
        if self._sampled:
            return NO_ROWS
        return None if any(getattr(recipe, name, bool)() for name in _RECIPES) else QUANTIZED

    def _overwrites(self, call: partial[Any]) -> bool:
        """Return whether this call's weight-gradient function overwrites the accumulated gradient.

        It may do so in a step's first microbatch. The host then runs it in the backward, before the functions of all
        other microbatches.
        """
        module: Any = self.module
        first = call.keywords.get("is_first_microbatch", getattr(module, "is_first_microbatch", None))
        return module.fuse_wgrad_accumulation and (bool(first) or any(value is True for value in call.args[1:]))

    def tapped(self, taps: Taps, call: partial[Any], parameters: Parameters) -> Any:
        """Run ``call`` with a store of ours, unless it overwrites the accumulated gradient."""
        if self._overwrites(call):
            return call()
        module: Any = self.module
        store, theirs, own, microbatch = _Store(), module.wgrad_store, module._parameters, taps.microbatch
        trained = self._trained()
        assert microbatch is not None

        def finish(received: Sequence[Any]) -> None:
            make = partial(self._make, store, trained, dict(zip(trained, received, strict=True)))
            taps.keep(microbatch, self, parameters, make=make, kept=store.kept)

        values = [parameter.detach() for parameter in trained.values()]
        aliases: Any = _Aliases.apply(finish, taps.anchor, *values)  # type: ignore[no-untyped-call]
        for name, alias in zip(trained, aliases, strict=True):
            vars(alias).update(vars(trained[name]))  # such as where to accumulate
            store.aliases[name] = alias
        try:
            own.update(store.aliases)
            module.wgrad_store = store
            return call()
        finally:
            own.update(trained)
            module.wgrad_store = theirs

    def _make(
        self, store: _Store, trained: dict[str, Any], received: dict[str, Any], choose: Choose | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the trained parameters. ``received`` are those that the backward has computed."""
        fused = bool(getattr(self.module, "fuse_wgrad_accumulation", False))
        waited = bool(store.tasks)
        found = self._run(store, trained, choose)
        gradients = []
        for name, parameter in trained.items():
            weight = name in self._weights
            if weight and hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = fused
            if weight and fused:
                gradients.append(parameter.new_zeros(()).expand_as(parameter))  # a dummy: it is already accumulated
                continue
            of_backward = None if weight and waited else received[name]
            gradient = found.get(name) if of_backward is None else of_backward
            gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
        return tuple(gradients)

    def _run(self, store: _Store, trained: dict[str, Any], choose: Choose | None) -> dict[str, Any]:
        """Run the module's deferred functions, for all tokens or some. Return gradients by name."""
        found: dict[str, Any] = {}
        products = self._products if self._grouped else [p for p in self._products if p[0] in trained]
        for number, task in enumerate(store.tasks):
            tensors = task.tensors
            of_task = products if self._grouped else products[number : number + 1]
            rows, biases = (tensors, {}) if choose is None else _some_rows(tensors, of_task, choose)
            result = task.function(*rows)
            if self._grouped:
                found |= dict(zip(self._weights, rows[2], strict=True))
                of_biases = [name for product in of_task for name in product[1:]]
                found |= dict(zip(of_biases, result[1] or [], strict=False))
            else:
                found |= dict(zip(of_task[0], result, strict=False))
            found |= biases
        store.tasks.clear()  # the graph holds the store, and may live on
        store.kept.clear()
        store.aliases.clear()
        return found


def _some_rows(
    tensors: Sequence[Any], products: Sequence[tuple[str, ...]], choose: Choose
) -> tuple[Sequence[Any], dict[str, torch.Tensor]]:
    """Return the arguments of a module's function with only the chosen rows, and the bias gradients from all rows.

    The first two of ``tensors`` are the inputs and the output gradients. A GroupedLinear has a list of each, by expert.
    """
    inputs, gradients, *rest = tensors
    grouped = isinstance(inputs, (list, tuple))
    pairs = list(zip(inputs, gradients, strict=True)) if grouped else [(inputs, gradients)]
    if len(pairs) != len(products) or not all(_has_rows(x) and _has_rows(g) for x, g in pairs):
        return tensors, {}
    rows, biases = [], {}
    for (x, gradient), (weight, *bias) in zip(pairs, products, strict=True):
        x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        rows.append(choose(weight, x, gradient))
        if len(rows[-1][1]) < len(gradient):
            biases.update(dict.fromkeys(bias, gradient.sum(dim=0)))
    if not grouped:
        return [*rows[0], *rest], biases
    return [[x for x, _ in rows], [gradient for _, gradient in rows], *rest], biases


def _has_rows(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and tensor.is_floating_point() and tensor.element_size() > 1


def _recipe() -> Any:
    """Return the active recipe of FP8 or FP4; None without one."""
    base: Any = sys.modules[f"{_ENGINE}.module.base"]
    state = base.FP8GlobalStateManager
    return state.get_fp8_recipe() if state.is_fp8_enabled() else None


def engine_layer(
    module: torch.nn.Module, sampled: bool = False, kind: type[torch.Tensor] = torch.nn.Parameter
) -> TappedLayer | None:
    """Return the tap of a layer of Transformer Engine with weights of this ``kind``; None if the layer gets no tap.

    A layer gets no tap if its products overlap with communication, if it defers weight gradients or shards weights
    itself, or if its weight is in parts. A store does not work with such layers.
    """
    engine: Any = sys.modules.get(_ENGINE)
    if engine is None or not type(module).__module__.startswith(_OWN):
        return None
    products = _products(engine, module)
    own: Any = module
    store = getattr(module, "wgrad_store", None)
    if not products or store is None or store.delay_wgrad_compute() or getattr(module, "fsdp_group", None) is not None:
        return None
    if any(value is True for name, value in vars(module).items() if name.startswith("ub_")):
        return None
    weights = [own._parameters.get(product[0]) for product in products]
    if not all(type(w) is kind and w.requires_grad and "shared_embedding" not in vars(w) for w in weights):
        return None
    fused = getattr(module, "fuse_wgrad_accumulation", False)
    if fused and not all(hasattr(weight, "grad_added_to_main_grad") for weight in weights):
        return None
    return EngineTap(module, products, isinstance(module, engine.GroupedLinear), sampled)


def linear_layer(
    module: torch.nn.Module, sampled: bool = False, kind: type[torch.Tensor] = torch.nn.Parameter
) -> TappedLayer | None:
    """Return the tap of torch's linear layer or of a layer of Transformer Engine; None for others."""
    return plain_layer(module, kind) or engine_layer(module, sampled, kind)


def _products(engine: Any, module: Any) -> list[tuple[str, ...]]:
    """Return the names of each product's weight, and of its bias if the product adds it."""
    if isinstance(module, engine.LayerNormMLP):
        names = [("fc2_weight", "fc2_bias"), ("fc1_weight", "fc1_bias")]  # in the order of the backward
        inside = bool(module.use_bias) and not getattr(module, "gemm_bias_unfused_add", False)
    elif isinstance(module, engine.GroupedLinear):
        names = [(f"weight{i}", f"bias{i}") for i in range(module.num_gemms)]
        inside = bool(module.use_bias) and bool(module.apply_bias)
    elif isinstance(module, (engine.Linear, engine.LayerNormLinear)) and module.weight_names == ["weight"]:
        names = [("weight", "bias")]
        unfused = getattr(module, "gemm_bias_unfused_add", False)
        inside = bool(module.use_bias) and bool(module.apply_bias) and not unfused
    else:
        return []
    return list(names) if inside else [product[:1] for product in names]
