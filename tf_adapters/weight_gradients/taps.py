"""Weight gradients apart from the backward: a tap on a layer's output saves the tensors that they are computed from.

A tapped layer's weight does not require gradients while the layer computes its output. The host's backward therefore
computes only input gradients there. The tap's backward passes the output's gradient on unchanged, and saves it with the
layer's input. ``StageTaps.compute`` computes the weight gradients later, from all tokens or a sample, in the order in
which a host would have accumulated them. Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", which splits
backwards into B and W.

A tap takes only the calls of a layer that it understands; the host computes all others. Before any layer is tapped, one
step finds the layers whose gradients a tap computes bit for bit as the host does (``tap_check``).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch

from tf_adapters.weight_gradients.parameters import without_gradients
from tf_adapters.weight_gradients.tap_check import NOT_PLAIN, TapCheck, accumulates
from tf_adapters.weight_gradients.tapped_classes import Run, intercept, release
from tf_adapters.weight_gradients.tokens import Rows

Choose = Callable[[str, torch.Tensor, torch.Tensor], Rows]
"""Chooses rows of inputs ``[tokens, inputs]`` and output gradients ``[tokens, outputs]``, for a weight of a layer.

The first argument is the layer's own name of the weight.
"""

Parameters = tuple[torch.nn.Parameter, ...]
_Gradients = dict[torch.nn.Parameter, torch.Tensor]


class RowSampler(Protocol):
    """Chooses the rows from which the gradient of a ``weight``, given by the stage's name, is computed."""

    def rows(self, weight: str, inputs: torch.Tensor, gradient: torch.Tensor) -> Rows: ...


class _Tap(torch.autograd.Function):
    """The layer's output, unchanged. The backward passes its gradient on, and to ``keep`` with the layer's input.

    ``anchor`` requires gradients, so that the backward runs whether or not the layer's input does.
    """

    @staticmethod
    def forward(
        ctx: Any, keep: Callable[..., None], inputs: torch.Tensor, output: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.keep = keep
        return output.detach()  # no view of it: the host may change the outputs of its layers in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor, None]:
        (inputs,) = ctx.saved_tensors
        if accumulates(ctx.next_functions[-1][0]):  # torch.autograd.grad does not, such as inside a stage's forward
            ctx.keep(inputs, gradient)
        return None, None, gradient, None


class _HandOver(torch.autograd.Function):
    """Gives a parameter its first gradient in a backward, through all hooks.

    No other reference to the gradient exists. The parameter therefore takes the tensor itself, as in a host's own
    backward. It would copy a tensor that is passed to ``torch.autograd.backward``.
    """

    @staticmethod
    def forward(ctx: Any, gradient: list[torch.Tensor], parameter: torch.nn.Parameter) -> torch.Tensor:
        ctx.gradient = gradient
        return parameter.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.gradient.pop()


class _Pending(NamedTuple):
    """One call of a layer. ``make`` computes the gradients of its parameters."""

    layer: TappedLayer
    parameters: Parameters
    make: Callable[[Choose | None], tuple[torch.Tensor, ...]]


class TappedLayer(ABC):
    """One layer whose weight gradients are computed apart from its backward.

    ``names`` are the module's own names of the parameters whose gradients pass the tap, the weight first. The first
    argument of the module's forward is the input.
    """

    attribute = "forward"
    """The method of the module that computes the output."""

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...] = ("weight",)) -> None:
        self._module, self.names = ref(module), names
        self._input = next(iter(inspect.signature(getattr(module, self.attribute)).parameters))
        self._taps: StageTaps | None = None

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

    def install(self, taps: StageTaps) -> None:
        self._taps = taps
        intercept(self.module, self.attribute, self.forward)

    def remove(self) -> None:
        self._taps = None
        module = self._module()
        if module is not None:
            release(module)

    def training(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Parameters:
        """Return the parameters that this call trains, the weight first if it trains.

        They are looked up in each call, because FSDP replaces them while the module computes.
        """
        return tuple(p for name in self.names if (p := getattr(self.module, name)).requires_grad)

    def forward(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's ``run``, with the tap on its output while a microbatch is recorded."""
        taps, call = self._taps, partial(run, *args, **kwargs)
        if taps is None or taps.microbatch is None or not torch.is_grad_enabled() or self in taps.left:
            return call()
        parameters = self.training(args, kwargs)
        if not parameters:
            return call()
        reason = self.reason_against(call, parameters)
        if taps.check is None:
            return call() if reason is not None else self.tapped(taps, call, parameters)
        with taps.check.inside(self):
            output = call()
            if reason is None:
                self.watched(taps.check, call, output, parameters)
            else:
                taps.check.not_understood(self, reason)
        return output

    def reason_against(self, call: partial[Any], parameters: Sequence[torch.nn.Parameter]) -> str | None:
        """Return the reason why a tap cannot compute this call's gradients; None if it can."""
        return None if _is_plain(self._input_of(call), parameters) else NOT_PLAIN

    def watched(self, check: TapCheck, call: partial[Any], output: Any, parameters: Parameters) -> None:
        """Let the step that is checked compare the tap's gradients of this call with the host's."""
        check.watch(self, self._input_of(call), output, parameters)

    def tapped(self, taps: StageTaps, call: partial[Any], parameters: Parameters) -> Any:
        """Return the output of ``call``, without a copy. In its backward its gradient is saved with the input."""
        microbatch = taps.microbatch
        assert microbatch is not None

        def keep(inputs: torch.Tensor, gradient: torch.Tensor) -> None:
            taps.keep(microbatch, self, parameters, make=partial(self.gradients, parameters, inputs, gradient))

        with without_gradients(parameters):
            output = call()
        return _Tap.apply(keep, self._input_of(call).detach(), output, taps.anchor)  # type: ignore[no-untyped-call]

    def _input_of(self, call: partial[Any]) -> Any:
        return call.args[0] if call.args else call.keywords.get(self._input)


Make = Callable[[torch.nn.Module], TappedLayer | None]


def _is_plain(inputs: Any, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether a layer's call is an ordinary product of real numbers, whose gradient a tap can compute.

    It is not under a transform of ``torch.func`` or forward-mode differentiation, nor if the weight is itself computed,
    nor for complex, nested, sparse or distributed tensors. An input of three or more dimensions has to be contiguous:
    torch's product otherwise has other bits if its weight needs no gradient.
    """
    return (
        type(inputs) in (torch.Tensor, torch.nn.Parameter)
        and inputs.layout is torch.strided
        and not inputs.is_nested
        and inputs.is_floating_point()
        and (inputs.ndim <= 2 or inputs.is_contiguous())
        and all(isinstance(p, torch.nn.Parameter) and p.is_leaf and p.is_floating_point() for p in parameters)
        and not transforms_run()
    )


def transforms_run() -> bool:
    """Return whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    return bool(torch._C._are_functorch_transforms_active()) or torch.autograd.forward_ad._current_level >= 0


class LinearTap(TappedLayer):
    """``torch.nn.Linear``. The host's backward computes the gradient of the bias, a sum that takes little time."""

    def gradients(
        self, parameters: Parameters, inputs: torch.Tensor, gradient: torch.Tensor, choose: Choose | None = None
    ) -> tuple[torch.Tensor, ...]:
        return (linear_gradient(parameters[0], inputs, gradient, choose),)


def linear_gradient(
    weight: torch.Tensor, inputs: torch.Tensor, gradient: torch.Tensor, choose: Choose | None = None
) -> torch.Tensor:
    """Gradient of a weight ``[outputs, inputs]``, by the product that torch's own backward runs."""
    inputs, gradient = inputs.reshape(-1, inputs.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    if choose is not None:
        inputs, gradient = choose("weight", inputs, gradient)
    inputs = inputs.to(gradient.dtype)  # under autocast the layer computes in another type
    return torch.mm(gradient.t(), inputs).to(weight.dtype)


def _hand_over(gradient: list[torch.Tensor], parameter: torch.nn.Parameter) -> None:
    """Accumulate the gradient, the only entry of the list, through the hooks on its parameter."""
    if parameter.grad is None:
        with torch.enable_grad():
            node: torch.Tensor = _HandOver.apply(gradient, parameter)  # type: ignore[no-untyped-call]
        torch.autograd.backward([node], [node.detach()])
    else:
        torch.autograd.backward([parameter], gradient)


class StageTaps:
    """The taps on one stage's layers.

    Args:
        model: the stage's module.
        make: returns the tap of a layer; None for a layer without one.
        accumulated: called whenever a microbatch's weight gradients have been accumulated apart from a backward.
    """

    def __init__(self, model: torch.nn.Module, make: Make, accumulated: Callable[[], None] = lambda: None) -> None:
        self._layers, self._accumulated = _layers(model, make), accumulated
        self._prefixes = {layer: name[: name.rfind(".") + 1] for name, layer in self._layers.items()}
        self.left: set[TappedLayer] = set()  # layers that are left to the host
        self.microbatch: int | None = None  # whose forward or backward runs
        self.check: TapCheck | None = None  # in the step that is checked
        self._pending: dict[int, deque[_Pending]] = {}
        self.anchor = torch.zeros(0, requires_grad=True)  # so that a tap's backward runs

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters whose gradients can be computed apart."""
        return frozenset(name for name, layer in self._layers.items() if layer not in self.left)

    def install(self) -> None:
        for layer in self._prefixes:
            layer.install(self)

    def remove(self) -> None:
        for layer in self._prefixes:
            layer.remove()

    def leave(self, names: Iterable[str]) -> None:
        """Leave the layers of these parameters to the host from now on."""
        self.left.update(self._layers[name] for name in names if name in self._layers)

    @contextmanager
    def checking(self, microbatch: int) -> Iterator[None]:
        """Run a forward or a backward of the step that is checked: the host computes all, and the tap compares."""
        self.check = self.check or TapCheck(self._layers)
        with self.recording(microbatch), self.check.looking(microbatch):
            yield

    def end_check(self) -> dict[str, str]:
        """End the step that is checked. Return why layers must be left to the host, by name of their parameters."""
        check, self.check = self.check, None
        return {} if check is None else check.end()

    @contextmanager
    def recording(self, microbatch: int) -> Iterator[None]:
        """Run a forward, or a backward, which may repeat forwards, and save what weight gradients need."""
        self.microbatch = microbatch
        try:
            yield
        finally:
            self.microbatch = None

    def clear(self) -> None:
        """Drop the pending gradients and the check of an earlier step."""
        self._pending.clear()
        self.end_check()

    def owes(self, microbatch: int) -> bool:
        """Return whether weight gradients of this microbatch are still to be computed."""
        return bool(self._pending.get(microbatch))

    @torch.no_grad()  # a host may receive gradients into tensors that require gradients
    def compute(self, microbatch: int, sampler: RowSampler | None = None) -> None:
        """Compute and accumulate the weight gradients of a microbatch, through the hooks on their parameters.

        They are computed from the rows that ``sampler`` returns, by default from all tokens.
        """
        pending = self._pending.pop(microbatch, deque())
        calls = Counter(parameter for call in pending for parameter in call.parameters)
        sums: _Gradients = {}
        while pending:
            complete = self._add_up(pending.popleft(), sampler, calls, sums)
            for parameter in tuple(complete):
                _hand_over([complete.pop(parameter)], parameter)
        self._accumulated()

    def _add_up(
        self, call: _Pending, sampler: RowSampler | None, calls: Counter[torch.nn.Parameter], sums: _Gradients
    ) -> _Gradients:
        """Return gradients of the parameters that no later call uses. Those of the others wait in ``sums``.

        A host's backward also adds up the gradients of several calls before it accumulates them.
        """
        complete: _Gradients = {}
        for parameter, gradient in zip(call.parameters, self._gradients(call, sampler), strict=True):
            calls[parameter] -= 1
            total = sums.pop(parameter) + gradient if parameter in sums else gradient
            (sums if calls[parameter] else complete)[parameter] = total
        return complete

    def _gradients(self, call: _Pending, sampler: RowSampler | None) -> tuple[torch.Tensor, ...]:
        if sampler is None:
            return call.make(None)
        prefix = self._prefixes[call.layer]
        return call.make(lambda weight, inputs, gradient: sampler.rows(prefix + weight, inputs, gradient))

    def keep(
        self,
        microbatch: int,
        layer: TappedLayer,
        parameters: Parameters,
        make: Callable[[Choose | None], tuple[torch.Tensor, ...]],
    ) -> None:
        """Note that a backward has reached a call of ``layer``. ``make`` computes its weight gradients later."""
        self._pending.setdefault(microbatch, deque()).append(_Pending(layer, parameters, make))


def _layers(model: torch.nn.Module, make: Make) -> dict[str, TappedLayer]:
    """Return the layers of a model that have a tap, by the model's names of their parameters.

    A layer that shares a parameter has none, since a tap sees only the gradients that pass its own layer. Nor has a
    layer whose forward was replaced, since that may compute anything.
    """
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    layers: dict[str, TappedLayer] = {}
    for prefix, module in model.named_modules():
        if "forward" not in vars(module) and all(uses[id(p)] == 1 for p in module.parameters(recurse=False)):
            layer = make(module)
            if layer is not None:
                layers.update((f"{prefix}.{name}" if prefix else name, layer) for name in layer.names)
    return layers


def plain_layer(module: torch.nn.Module, kind: type[torch.Tensor] = torch.nn.Parameter) -> TappedLayer | None:
    """Return the tap of torch's own linear layer, if its weight is of this ``kind``; None for others.

    A layer that computes with a DTensor has no tap, for example: a rank holds only a shard of the weight.
    """
    weight = vars(module)["_parameters"].get("weight")
    if type(module) is not torch.nn.Linear or type(weight) is not kind:
        return None
    return LinearTap(module) if weight.requires_grad and weight.is_floating_point() else None
