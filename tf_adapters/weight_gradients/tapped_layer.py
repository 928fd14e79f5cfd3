"""A layer whose weight gradients are computed apart from its backward, and torch's own linear layer as one.

A tapped layer's weight does not require gradients while the layer computes its output. The host's backward therefore
computes only input gradients there. The tap on the output saves the output's gradient with the layer's input.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch

from tf_adapters.weight_gradients.interception import Interception, Run
from tf_adapters.weight_gradients.kept import Kept
from tf_adapters.weight_gradients.reasons import NOT_PLAIN, SECOND_DERIVATIVE, USERS_HOOK
from tf_adapters.weight_gradients.tap_function import Diverted, Gradients, Tap, TappedCall, apply
from tf_adapters.weight_gradients.tokens import Rows

Choose = Callable[[str, torch.Tensor, torch.Tensor], Rows]
"""Chooses rows of inputs ``[tokens, inputs]`` and output gradients ``[tokens, outputs]``, for a weight of a layer.

The first argument is the layer's own name of the weight.
"""

Parameters = tuple[torch.nn.Parameter, ...]
Make = Callable[[Choose | None], tuple[torch.Tensor, ...]]
"""Computes the gradients of a call's parameters."""

_HOSTS = ("deepspeed", "megatron", "megatron_patches", "tf_adapters", "torch.distributed", "transformer_engine")
"""Packages whose hooks on parameters, and reads of gradients, work as well if gradients come later."""


_OPTIMIZERS_IN_HOOKS = "torch.distributed.optim"
"""A package whose hooks update weights in the backward."""


class Taps(Protocol):
    """What a layer needs to know of its stage's taps."""

    microbatch: int | None
    anchor: torch.Tensor

    @property
    def check(self) -> Check | None: ...

    def taps(self, layer: TappedLayer, kind: Hashable) -> bool: ...

    def called(self, parameters: Parameters) -> None: ...

    def keep(
        self, microbatch: int, layer: TappedLayer, parameters: Parameters, *, make: Make, kept: Sequence[Kept]
    ) -> None: ...

    def surprised(self, layer: TappedLayer, reason: str) -> None: ...

    def named(self, parameters: Parameters) -> Sequence[torch.Tensor]: ...

    def asked_by_name(self, layer: TappedLayer) -> None: ...


class Check(Protocol):
    """What a layer needs of a step that is checked."""

    def watches(self, layer: TappedLayer) -> bool: ...

    def inside(self, layer: TappedLayer) -> Any: ...

    def trust(self, layer: TappedLayer, parameters: Parameters, kind: Hashable) -> None: ...

    def watched(self, layer: TappedLayer, parameters: Parameters, kind: Hashable) -> TappedCall: ...

    def not_understood(self, layer: TappedLayer, reason: str) -> None: ...

    def has_seen(self, layer: TappedLayer, kind: Hashable) -> bool: ...

    def note_use(self, weight: torch.Tensor) -> None: ...

    def uses(self, weight: torch.Tensor) -> int: ...

    def unwatched(self) -> Any: ...


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class TappedLayer(ABC):
    """One layer whose weight gradients are computed apart from its backward.

    ``names`` are the module's own names of the parameters whose gradients pass the tap, the weight first. The first
    argument of the module's forward is the input.
    """

    attribute = "forward"
    """The method of the module that computes the output."""

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...] = ("weight",)) -> None:
        self._module, self.names = ref(module), names
        self.input_name = next(iter(inspect.signature(getattr(module, self.attribute)).parameters))
        self._taps: Taps | None = None
        self._interception: Interception | None = None

    @property
    def module(self) -> torch.nn.Module:
        module = self._module()
        assert module is not None
        return module

    @abstractmethod
    def gradients(
        self, parameters: Parameters, inputs: torch.Tensor, gradient: torch.Tensor, choose: Choose | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of these parameters, in their shapes and types.

        The weight's gradient is computed from the rows that ``choose`` returns, by default from all.
        """

    def install(self, taps: Taps) -> None:
        self._taps = taps
        self._interception = Interception(self.module, self.attribute, self.forward)

    def remove(self) -> None:
        self._taps = None
        interception, self._interception = self._interception, None
        if interception is not None:
            interception.remove()

    def training(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Parameters:
        """Return the parameters that this call trains, the weight first if it trains.

        They are looked up in each call, because FSDP replaces them while the module computes.
        """
        module = self.module
        return tuple([p for name in self.names if (p := _parameter(module, name)).requires_grad])

    def forward(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's ``run``, with the tap on its output while a microbatch is recorded."""
        taps, call = self._taps, partial(run, *args, **kwargs)
        if taps is None or taps.microbatch is None or not torch.is_grad_enabled():
            return call()
        # From here to the layer's own call, each line counts: narrow layers take no longer than this code.
        parameters = self.training(args, kwargs)
        if not parameters:
            return call()
        if taps.check is not None and taps.check.watches(self):
            return self.checked(taps, taps.check, call, parameters)
        inputs = self._input_of(call)
        if not taps.taps(self, self.kind(inputs)) or self.reason_against(call, parameters) is not None:
            return call()
        return self.tapped(taps, call, parameters)

    def checked(self, taps: Taps, check: Check, call: partial[Any], parameters: Parameters) -> Any:
        """Let the host compute a call of a step that is checked, and watch its gradients."""
        with check.inside(self):
            output = call()
            reason = self.reason_against(call, parameters)
            if reason is None:
                return self.watched(taps, check, call, output=output, parameters=parameters)
        check.not_understood(self, reason)
        return output

    def reason_against(self, call: partial[Any], parameters: Sequence[torch.nn.Parameter]) -> str | None:
        """Return the reason why a tap cannot compute this call's gradients; None if it can."""
        if has_users_hook(parameters):
            return USERS_HOOK
        return None if _is_plain(self._input_of(call), parameters) else NOT_PLAIN

    def kind(self, inputs: Any) -> Hashable:
        """Return what a product depends on besides its values: a kind that no check has seen has no tap."""
        cast = autocast_type(inputs) if isinstance(inputs, torch.Tensor) else None
        return getattr(inputs, "dtype", None), getattr(inputs, "ndim", None), cast

    def watched(self, taps: Taps, check: Check, call: partial[Any], output: Any, parameters: Parameters) -> Any:
        """Return ``output`` with a tap that only compares: the step compares its gradients with the host's."""
        inputs = self._input_of(call)
        watch = check.watched(self, parameters, self.kind(inputs))
        multiplied = _as_multiplied(inputs.detach(), output)
        return Tap.apply(watch, multiplied, output, taps.anchor)  # type: ignore[no-untyped-call]

    def tapped(self, taps: Taps, call: partial[Any], parameters: Parameters) -> Any:
        """Return the output of ``call``, without a copy. In its backward its gradient is saved with the input."""
        taps.called(parameters)
        for parameter in parameters:  # as ``without_gradients``, which takes longer
            parameter.requires_grad = False
        try:
            output = call()
        finally:
            for parameter in parameters:
                parameter.requires_grad = True
        tapped, multiplied = _Call(taps, self, parameters, call), _as_multiplied(self._input_of(call), output)
        named = taps.named(parameters)
        return apply(Tap, (tapped, multiplied, output, taps.anchor, *named))

    def _input_of(self, call: partial[Any]) -> Any:
        return call.args[0] if call.args else call.keywords.get(self.input_name)


def _parameter(module: torch.nn.Module, name: str) -> Any:
    """Return ``module.name``. ``torch.nn.Module`` looks for its parameters last, which takes longer."""
    attributes = vars(module)
    found = None if name in attributes else attributes["_parameters"].get(name)
    return getattr(module, name) if found is None else found


def _as_multiplied(inputs: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the input in the type of its product: under autocast the host keeps this copy, not the input."""
    return inputs if inputs.dtype == output.dtype else inputs.to(output.dtype)


def autocast_type(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the type to which autocast now casts the operands of products on this tensor's device."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class _Call:
    """One call of a layer whose backward has not come yet. It holds no reference to the call's input."""

    __slots__ = ("_cast", "_keywords", "_layer", "_microbatch", "_others", "_parameters", "_run", "_taps")

    def __init__(self, taps: Taps, layer: TappedLayer, parameters: Parameters, call: partial[Any]) -> None:
        assert taps.microbatch is not None
        self._taps, self._layer, self._parameters = taps, layer, parameters
        self._microbatch, self._cast = taps.microbatch, autocast_type(parameters[0])
        self._run, self._others = call.func, call.args[1:]
        self._keywords = call.keywords and {k: value for k, value in call.keywords.items() if k != layer.input_name}

    def second_derivative(self) -> None:
        self._taps.surprised(self._layer, SECOND_DERIVATIVE)

    def keep(self, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        kept = Kept(inputs), Kept(gradient)
        keep_product(self._taps, self._microbatch, self._layer, parameters=self._parameters, kept=kept)

    def at_once(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Gradients:
        self._taps.asked_by_name(self._layer)
        with torch.no_grad():
            return self._layer.gradients(self._parameters, inputs.detach(), gradient)

    def input_gradient(self, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        apart = inputs.detach().requires_grad_()
        with self._diverted():
            output = self._again(apart)
        return torch.autograd.grad(output, apart, gradient.detach(), create_graph=True)[0]

    def with_graph(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Gradients:
        return torch.autograd.grad(self._again(inputs), self._parameters, gradient, create_graph=True)

    def _again(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the layer once more, under the forward's autocast."""
        device, casts = inputs.device.type, self._cast is not None
        with torch.autocast(device, dtype=self._cast, enabled=casts, cache_enabled=False):
            if self._others or not self._keywords:
                result: torch.Tensor = self._run(inputs, *self._others, **self._keywords)
                return result
            return self._run(**{self._layer.input_name: inputs}, **self._keywords)  # type: ignore[no-any-return]

    @contextmanager
    def _diverted(self) -> Iterator[None]:
        """Compute the layer with aliases of its parameters, so that their further gradients are added to the tap's.

        A host's backward adds up all gradients of a parameter before it accumulates them.
        """
        keywords, own = self._keywords, self._layer.module._parameters
        aliases: dict[int, Any] = {}
        named = self._taps.named(self._parameters)
        for place, parameter in enumerate(self._parameters):
            take = partial(self._take, place)
            alias: Any = Diverted.apply(take, parameter.detach(), named[place], self._taps.anchor)  # type: ignore[no-untyped-call]
            aliases[id(parameter)] = alias
        replaced = {name: value for name, value in own.items() if id(value) in aliases}
        self._keywords = {name: aliases.get(id(value), value) for name, value in keywords.items()}
        own.update({name: aliases[id(value)] for name, value in replaced.items()})
        try:
            yield
        finally:
            own.update(replaced)
            self._keywords = keywords

    def _take(self, place: int, gradient: torch.Tensor) -> None:
        parameter, kept = self._parameters[place], Kept(gradient)
        make = partial(_as_kept, kept)
        self._taps.keep(self._microbatch, self._layer, (parameter,), make=make, kept=(kept,))


def keep_product(
    taps: Taps, microbatch: int, layer: TappedLayer, *, parameters: Parameters, kept: tuple[Kept, Kept]
) -> None:
    """Keep inputs and output gradient of one call of a layer for its weight gradients."""
    taps.keep(microbatch, layer, parameters, make=partial(_from_kept, layer, parameters, *kept), kept=kept)


def _from_kept(
    layer: TappedLayer, parameters: Parameters, inputs: Kept, gradient: Kept, choose: Choose | None
) -> tuple[torch.Tensor, ...]:
    return layer.gradients(parameters, inputs.tensor, gradient.tensor, choose)


def _as_kept(kept: Kept, choose: Choose | None) -> tuple[torch.Tensor, ...]:
    return (kept.tensor,)


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether any hook that torch lists is on the parameter."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_users_hook(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a hook on one of these is not a host's. It may need each microbatch's gradient in its backward."""
    hooked = [p for p in parameters if has_hooks(p)]
    return bool(hooked) and (any(_has_users(p._backward_hooks) for p in hooked) or may_update_in_backward(hooked))


def may_update_in_backward(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a hook on one of these, which is not a host's, runs when its gradient has been accumulated."""
    return any(_has_users(getattr(p, "_post_accumulate_grad_hooks", None)) for p in parameters)


def _has_users(hooks: Any) -> bool:
    return bool(hooks) and not all(_is_hosts(hook) for hook in hooks.values())


def _is_hosts(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return is_of_host(module) and not module.startswith(_OPTIMIZERS_IN_HOOKS)


def is_of_host(module: str) -> bool:
    """Return whether a module of this name belongs to a host or to this package."""
    return any(module == host or module.startswith(f"{host}.") for host in _HOSTS)


def _is_plain(inputs: Any, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether a layer's call is an ordinary product of real numbers, whose gradient a tap can compute.

    It is not if a transform of ``torch.func`` or forward-mode differentiation runs, or if the weight is itself
    computed. Nor is it for complex, nested, sparse or distributed tensors. An input of three or more dimensions has to
    be contiguous: torch's product otherwise has other bits if its weight needs no gradient.
    """
    for parameter in parameters:
        if not (isinstance(parameter, torch.nn.Parameter) and parameter.is_leaf and parameter.is_floating_point()):
            return False
    return (
        type(inputs) in _PLAIN
        and inputs.layout is torch.strided
        and not inputs.is_nested
        and inputs.is_floating_point()
        and (inputs.ndim <= 2 or inputs.is_contiguous())
        and not transforms_run()
    )


def transforms_run() -> bool:
    """Return whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    return bool(torch._C._are_functorch_transforms_active()) or torch.autograd.forward_ad._current_level >= 0


class LinearTap(TappedLayer):
    """``torch.nn.Linear``. The host's backward computes the gradient of the bias, a sum that takes little time."""

    def kind(self, inputs: Any) -> Hashable:
        """Return also the function that multiplies: other code may replace it during the run."""
        return super().kind(inputs), torch.nn.functional.linear

    def gradients(
        self, parameters: Parameters, inputs: torch.Tensor, gradient: torch.Tensor, choose: Choose | None = None
    ) -> tuple[torch.Tensor, ...]:
        return (linear_gradient(parameters[0], inputs, gradient, choose),)


def linear_gradient(
    weight: torch.Tensor, inputs: torch.Tensor, gradient: torch.Tensor, choose: Choose | None = None
) -> torch.Tensor:
    """Gradient of a weight ``[outputs, inputs]``, by the product that torch's own backward runs."""
    if inputs.ndim != 2 or gradient.ndim != 2:
        inputs, gradient = inputs.reshape(-1, inputs.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    if choose is not None:
        inputs, gradient = choose("weight", inputs, gradient)
    if inputs.dtype != gradient.dtype:  # under autocast the layer computes in another type
        inputs = inputs.to(gradient.dtype)
    product = torch.mm(gradient.t(), inputs)
    return product if product.dtype == weight.dtype else product.to(weight.dtype)


def plain_layer(module: torch.nn.Module, kind: type[torch.Tensor] = torch.nn.Parameter) -> TappedLayer | None:
    """Return the tap of torch's own linear layer, if its weight is of this ``kind``; None for others.

    A layer that computes with a DTensor has no tap, for example: a rank holds only a shard of the weight.
    """
    weight = vars(module)["_parameters"].get("weight")
    if type(module) is not torch.nn.Linear or type(weight) is not kind:
        return None
    return LinearTap(module) if weight.requires_grad and weight.is_floating_point() else None
