"""Taps on Transformer Engine's layers: their own functions compute the weight gradients, later.

In the backward, each module asks its ``wgrad_store`` whether the weight gradient is to wait. If so, it hands the store
the tensors and the function that computes the gradient. A call that is recorded gets a store of its own. It also gets
aliases of the parameters, through which no gradient reaches the parameters themselves. They are needed because a module
whose gradients wait returns no real ones: it returns none, a dummy, or (GroupedLinear) tensors that nothing was written
into. The parameter's hooks see the real gradient once it is computed.
Source: transformer_engine/pytorch/module/ (2.3 and newer).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from tf_adapters.weight_gradients.tap_check import NO_ROWS, NOT_PLAIN, QUANTIZED, SPECIAL_WEIGHT, accumulates
from tf_adapters.weight_gradients.tapped_classes import Run
from tf_adapters.weight_gradients.taps import Choose, StageTaps, TappedLayer, plain_layer, transforms_run

__all__ = ["EngineTap", "engine_layer", "linear_layer"]

_ENGINE = "transformer_engine.pytorch"
_OWN = ("transformer_engine.", "megatron.core.extensions.transformer_engine")
"""Where the classes are written whose forward is understood; a user's subclass may do anything with its weight."""

_RECIPES = ("delayed", "float8_current_scaling", "float8_block_scaling")
"""Methods of an FP8 recipe. With a recipe for which one of them is true, deferral gave the host's bits on a GPU."""

Finish = Callable[[Sequence[Any]], None]


class _Aliases(torch.autograd.Function):
    """Parameters' values again. Their gradients are passed to ``finish``, None for a missing one."""

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


class _Store:
    """The place of a module's ``wgrad_store`` in one call."""

    def __init__(self) -> None:
        self.tasks: list[tuple[Sequence[Any], Callable[..., Any]]] = []
        self.aliases: dict[str, Any] = {}  # the module knows them by weak references

    def delay_wgrad_compute(self) -> bool:
        return True

    def put(self, tensors: Sequence[Any], function: Callable[..., Any]) -> None:
        self.tasks.append((tensors, function))


class EngineTap(TappedLayer):
    """A layer of Transformer Engine. ``products`` are names of weights and biases, in the order of the backward.

    A GroupedLinear has one function for all of its products.
    """

    def __init__(
        self, module: torch.nn.Module, products: Sequence[tuple[str, ...]], grouped: bool, sampled: bool
    ) -> None:
        super().__init__(module, tuple(name for product in products for name in product))
        self._products, self._grouped, self._sampled = products, grouped, sampled
        self._weights = [product[0] for product in products]

    def gradients(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError  # the module's own functions compute them: see forward

    def forward(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's ``run``, with a store of ours while a microbatch is recorded."""
        taps = self._taps
        if taps is None or taps.microbatch is None or not torch.is_grad_enabled() or not taps.takes(self):
            return run(*args, **kwargs)
        own = self.module._parameters
        trained = {name: p for name in self.names if (p := own.get(name)) is not None and p.requires_grad}
        if not any(name in trained for name in self._weights):
            return run(*args, **kwargs)
        if taps.check is not None:
            with taps.check.inside(self):
                output = run(*args, **kwargs)
            reason = self._not_understood(trained.values())
            if reason is None:
                taps.check.trust(self, tuple(trained.values()))
            else:
                taps.check.not_plain(self, reason)
            return output
        if self._overwrites(args, kwargs) or self._not_understood(trained.values()) is not None:
            return run(*args, **kwargs)
        return self._delayed(partial(run, *args, **kwargs), taps, trained)

    def _not_understood(self, parameters: Iterable[torch.nn.Parameter]) -> str | None:
        """Why a call now is left to the host; None where it is understood."""
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

    def _overwrites(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this call's weight-gradient function overwrites the accumulated gradient.

        It may do so in a step's first microbatch. The host then runs it in the backward, before the functions of all
        other microbatches.
        """
        module: Any = self.module
        first = kwargs.get("is_first_microbatch", getattr(module, "is_first_microbatch", None))
        return module.fuse_wgrad_accumulation and (bool(first) or any(value is True for value in args[1:]))

    def _delayed(self, run: Callable[[], Any], taps: StageTaps, trained: dict[str, torch.nn.Parameter]) -> Any:
        module: Any = self.module
        store, theirs, own, microbatch = _Store(), module.wgrad_store, module._parameters, taps.microbatch
        assert microbatch is not None

        def finish(received: Sequence[Any]) -> None:
            parameters = tuple(trained.values())
            make = partial(self._make, store, trained, dict(zip(trained, received, strict=True)))
            taps.keep(microbatch, self, parameters, make)

        values = [parameter.detach() for parameter in trained.values()]
        aliases: Any = _Aliases.apply(finish, taps.anchor, *values)  # type: ignore[no-untyped-call]
        for name, alias in zip(trained, aliases, strict=True):
            vars(alias).update(vars(trained[name]))  # where to accumulate, for one
            store.aliases[name] = alias
        try:
            own.update(store.aliases)
            module.wgrad_store = store
            return run()
        finally:
            own.update(trained)
            module.wgrad_store = theirs

    def _make(
        self, store: _Store, trained: dict[str, Any], received: dict[str, Any], choose: Choose | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of the trained parameters; ``received`` came in the backward, as a bias's may."""
        fused = bool(getattr(self.module, "fuse_wgrad_accumulation", False))
        waited = bool(store.tasks)
        found = self._run(store, trained, choose)
        gradients = []
        for name, parameter in trained.items():
            weight = name in self._weights
            if weight and hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = fused
            if weight and fused:
                gradients.append(parameter.new_zeros(()).expand_as(parameter))  # a dummy: it has been accumulated
                continue
            of_backward = None if weight and waited else received[name]
            gradient = found.get(name) if of_backward is None else of_backward
            gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
        return tuple(gradients)

    def _run(self, store: _Store, trained: dict[str, Any], choose: Choose | None) -> dict[str, Any]:
        """Run the functions that the module has put off, for all tokens or some. Return gradients by name."""
        found: dict[str, Any] = {}
        products = self._products if self._grouped else [p for p in self._products if p[0] in trained]
        for number, (tensors, function) in enumerate(store.tasks):
            of_task = products if self._grouped else products[number : number + 1]
            rows, biases = (tensors, {}) if choose is None else _some_rows(tensors, of_task, choose)
            result = function(*rows)
            if self._grouped:
                found |= dict(zip(self._weights, rows[2], strict=True))
                of_biases = [name for product in of_task for name in product[1:]]
                found |= dict(zip(of_biases, result[1] or [], strict=False))
            else:
                found |= dict(zip(of_task[0], result, strict=False))
            found |= biases
        store.tasks.clear()
        store.aliases.clear()
        return found


def _some_rows(
    tensors: Sequence[Any], products: Sequence[tuple[str, ...]], choose: Choose
) -> tuple[Sequence[Any], dict[str, torch.Tensor]]:
    """The arguments of a module's function with chosen rows only, and the bias gradients, which are of all rows.

    ``tensors`` are inputs and output gradients, of a GroupedLinear a list of each by expert. Others stay as they are.
    """
    inputs, gradients, *rest = tensors
    grouped = isinstance(inputs, (list, tuple))
    pairs = list(zip(inputs, gradients, strict=True)) if grouped else [(inputs, gradients)]
    if len(pairs) != len(products) or not all(_has_rows(x) and _has_rows(g) for x, g in pairs):
        return tensors, {}
    rows, biases = [], {}
    for (x, gradient), (weight, *bias) in zip(pairs, products, strict=True):
        x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        rows.append(choose(x, gradient, weight))
        if len(rows[-1][1]) < len(gradient):
            biases.update(dict.fromkeys(bias, gradient.sum(dim=0)))
    if not grouped:
        return [*rows[0], *rest], biases
    return [[x for x, _ in rows], [gradient for _, gradient in rows], *rest], biases


def _has_rows(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and tensor.is_floating_point() and tensor.element_size() > 1


def _recipe() -> Any:
    """The recipe of FP8 or FP4 that is on; None where none is."""
    base: Any = sys.modules[f"{_ENGINE}.module.base"]
    state = base.FP8GlobalStateManager
    return state.get_fp8_recipe() if state.is_fp8_enabled() else None


def engine_layer(
    module: torch.nn.Module, sampled: bool = False, kind: type[torch.Tensor] = torch.nn.Parameter
) -> TappedLayer | None:
    """Return the tap of a layer of Transformer Engine with weights of this ``kind``; None if the layer gets no tap.

    A layer gets no tap if a store does not work with it. This holds if its products overlap with communication, if it
    puts off weight gradients or shards weights by itself, or if its weight is in parts. If tokens are ``sampled``, the
    tap leaves calls in FP8 or FP4 to the host.
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
    if not all(type(w) is kind and w.requires_grad for w in weights):
        return None
    if any("shared_embedding" in vars(weight) for weight in weights):
        return None
    fused = getattr(module, "fuse_wgrad_accumulation", False)
    if fused and not all(hasattr(weight, "grad_added_to_main_grad") for weight in weights):
        return None
    return EngineTap(module, products, isinstance(module, engine.GroupedLinear), sampled)


def linear_layer(
    module: torch.nn.Module, sampled: bool = False, kind: type[torch.Tensor] = torch.nn.Parameter
) -> TappedLayer | None:
    """The tap of torch's own linear layer, or of a layer of Transformer Engine, with a weight of this ``kind``.

    None for others. ``sampled`` says that tokens are sampled.
    """
    return plain_layer(module, kind) or engine_layer(module, sampled, kind)


def _products(engine: Any, module: Any) -> list[tuple[str, ...]]:
    """The names of each product's weight, and of its bias where that is added inside of it."""
    if isinstance(module, engine.LayerNormMLP):
        names = [("fc2_weight", "fc2_bias"), ("fc1_weight", "fc1_bias")]  # in the order of the backward
        inside = bool(module.use_bias) and not getattr(module, "gemm_bias_unfused_add", False)
    elif isinstance(module, engine.GroupedLinear):
        names = [(f"weight{i}", f"bias{i}") for i in range(module.num_gemms)]
        inside = bool(module.use_bias) and bool(module.apply_bias)
    elif isinstance(module, (engine.Linear, engine.LayerNormLinear)) and module.weight_names == ["weight"]:
        names = [("weight", "bias")]
        inside = bool(module.use_bias) and bool(module.apply_bias)
        inside = inside and not getattr(module, "gemm_bias_unfused_add", False)
    else:
        return []
    return list(names) if inside else [product[:1] for product in names]
