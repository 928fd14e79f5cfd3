"""Weight gradients apart from the backward: a tap on a layer's output keeps what they are made from.

A tapped layer's weight does not require gradients while the layer computes its output. The host's backward therefore
computes only input gradients there. The tap's backward passes the output's gradient on unchanged, and keeps it with the
layer's input. ``compute`` makes the weight gradients later, from all tokens or a sample, in the order in which a host
would have accumulated them (Qi et al. 2024, "Zero Bubble Pipeline Parallelism": backwards split into B and W).

A tap takes only the uses of a layer that it understands (``_is_plain``); every other call is the host's own. Before any
layer is tapped, one step finds out which layers' gradients a tap computes as the host does (``tap_check``).
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
from tf_adapters.weight_gradients.tap_check import TapCheck, accumulates
from tf_adapters.weight_gradients.tapped_classes import Run, intercept, release
from tf_adapters.weight_gradients.tokens import Rows

__all__ = ["Choose", "LinearTap", "StageTaps", "TappedLayer", "linear_gradient", "plain_layer", "transforms_run"]


class Choose(Protocol):
    """Chooses the rows that a gradient is made from."""

    def __call__(self, inputs: torch.Tensor, gradient: torch.Tensor, weight: str | None = None) -> Rows:
        """Rows of inputs ``[tokens, inputs]`` and output gradients ``[tokens, outputs]``.

        ``weight`` is the layer's own name of the weight, by default that of its first one.
        """
        ...


Gradients = dict[torch.nn.Parameter, torch.Tensor]


class RowSampler(Protocol):
    """Chooses the rows that the gradient of a ``weight`` is made from."""

    def rows(self, weight: str, inputs: torch.Tensor, gradient: torch.Tensor) -> Rows: ...


class _Tap(torch.autograd.Function):
    """A layer's output again. Its gradient is handed down, and kept with the layer's input for ``StageTaps.compute``.

    ``anchor`` requires gradients, so that the backward runs whether or not the layer's input does.
    """

    @staticmethod
    def forward(
        ctx: Any, keep: Callable[..., None], inputs: torch.Tensor, output: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.keep = keep
        return output.detach()  # no view of it: the host may change its layers' outputs in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor, None]:
        (inputs,) = ctx.saved_tensors
        if accumulates(ctx.next_functions[-1][0]):  # torch.autograd.grad, inside a stage's forward say, does not
            ctx.keep(inputs, gradient)
        return None, None, gradient, None


class _HandOver(torch.autograd.Function):
    """Gives a parameter its first gradient in a backward, through all hooks.

    Nothing else holds the gradient's tensor. The parameter therefore keeps that tensor, as in a host's own backward. It
    would keep a copy of a tensor that is passed to ``torch.autograd.backward``.
    """

    @staticmethod
    def forward(ctx: Any, gradient: list[torch.Tensor], parameter: torch.nn.Parameter) -> torch.Tensor:
        ctx.gradient = gradient
        return parameter.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.gradient.pop()


class _Pending(NamedTuple):
    """One call of a layer whose weight gradients ``make`` computes."""

    layer: TappedLayer
    parameters: tuple[torch.nn.Parameter, ...]
    make: Callable[[Choose | None], tuple[torch.Tensor, ...]]


class TappedLayer(ABC):
    """One layer whose weight gradients are computed apart. A subclass says how.

    ``names`` are the module's own names of the parameters whose gradients pass the tap, its weight first. The module's
    forward takes the input first.
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
        self,
        parameters: tuple[torch.nn.Parameter, ...],
        inputs: torch.Tensor,
        gradient: torch.Tensor,
        choose: Choose | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of these parameters, in their shapes and types.

        The weight's is computed from the rows that ``choose`` takes, by default from all.
        """

    def install(self, taps: StageTaps) -> None:
        self._taps = taps
        intercept(self.module, self.attribute, self)

    def remove(self) -> None:
        self._taps = None
        module = self._module()
        if module is not None:
            release(module)

    def training(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.nn.Parameter, ...]:
        """The parameters that this call trains, its weight first if it trains that.

        Looked up now: FSDP puts others into the parameters' place while the module computes.
        """
        return tuple(p for name in self.names if (p := getattr(self.module, name)).requires_grad)

    def forward(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's ``run``, with the tap on its output while a microbatch is recorded."""
        taps = self._taps
        if taps is None or taps.microbatch is None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        inputs: Any = args[0] if args else kwargs.get(self._input)
        parameters = self.training(args, kwargs) if taps.takes(self) else ()
        if not parameters:
            return run(*args, **kwargs)
        plain = _is_plain(inputs, parameters)
        if taps.check is not None:
            with taps.check.inside(self):
                output = run(*args, **kwargs)
                if plain:
                    taps.check.watch(self, inputs, output, parameters)
                else:
                    taps.check.not_plain(self)
            return output
        if not plain:
            return run(*args, **kwargs)
        with without_gradients(parameters):
            output = run(*args, **kwargs)
        return taps.tap(self, output, inputs=inputs, parameters=parameters)


Make = Callable[[torch.nn.Module], TappedLayer | None]


def _is_plain(inputs: Any, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether a tap can compute the gradient of a layer's call: an ordinary product of real numbers.

    A tap cannot under a transform of ``torch.func`` or forward-mode differentiation. It cannot if the weight is
    computed itself, or for complex numbers and tensors with rules of their own (DTensors, nested and sparse ones). Nor
    can it if an input of three or more dimensions is not contiguous: torch's product then has other bits if its weight
    needs no gradient.
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
    """``torch.nn.Linear``. Its bias gets its gradient with the input gradient: a sum, next to nothing."""

    def gradients(
        self,
        parameters: tuple[torch.nn.Parameter, ...],
        inputs: torch.Tensor,
        gradient: torch.Tensor,
        choose: Choose | None = None,
    ) -> tuple[torch.Tensor, ...]:
        return (linear_gradient(parameters[0], inputs, gradient, choose),)


def linear_gradient(
    weight: torch.Tensor, inputs: torch.Tensor, gradient: torch.Tensor, choose: Choose | None = None
) -> torch.Tensor:
    """Gradient of a weight ``[outputs, inputs]``, by the product that torch's own backward runs."""
    inputs, gradient = inputs.reshape(-1, inputs.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    if choose is not None:
        inputs, gradient = choose(inputs, gradient)
    inputs = inputs.to(gradient.dtype)  # under autocast the layer computed in another type
    return torch.mm(gradient.t(), inputs).to(weight.dtype)


def _hand_over(gradient: list[torch.Tensor], parameter: torch.nn.Parameter) -> None:
    """Accumulate the one gradient in the list, through the hooks on its parameter."""
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
        make: the tap of a layer; None for one that it does not know.
        accumulated: called whenever a microbatch's weight gradients have been accumulated apart from a backward.
    """

    def __init__(self, model: torch.nn.Module, make: Make, accumulated: Callable[[], None] = lambda: None) -> None:
        self._layers, self._accumulated = _layers(model, make), accumulated
        self._names: dict[TappedLayer, dict[str, str]] = {}  # by layer and its own name of a parameter
        for name, layer in self._layers.items():
            self._names.setdefault(layer, {})[name.rpartition(".")[2]] = name
        self._left: set[TappedLayer] = set()
        self.microbatch: int | None = None  # whose forward or backward runs
        self.check: TapCheck | None = None  # in the step that is checked
        self._pending: dict[int, deque[_Pending]] = {}
        self.anchor = torch.zeros(0, requires_grad=True)  # so that a tap's backward runs

    @property
    def names(self) -> frozenset[str]:
        """The parameters whose gradients can be computed apart."""
        return frozenset(name for name, layer in self._layers.items() if layer not in self._left)

    def install(self) -> None:
        for layer in dict.fromkeys(self._layers.values()):
            layer.install(self)

    def remove(self) -> None:
        for layer in dict.fromkeys(self._layers.values()):
            layer.remove()

    def takes(self, layer: TappedLayer) -> bool:
        return layer not in self._left

    def leave(self, names: Iterable[str]) -> None:
        """Leave the layers of these parameters to the host from now on."""
        self._left.update(self._layers[name] for name in names if name in self._layers)

    @contextmanager
    def checking(self, microbatch: int) -> Iterator[None]:
        """Around a forward or a backward of the step that is checked: compute as the host does, and compare."""
        self.check = self.check or TapCheck(self._layers)
        with self.recording(microbatch), self.check.looking(microbatch):
            yield

    def end_check(self) -> dict[str, str]:
        """The step has ended: parameters whose layers are to be left to the host, by name, and why."""
        check, self.check = self.check, None
        return {} if check is None else check.end()

    @contextmanager
    def recording(self, microbatch: int) -> Iterator[None]:
        """Around a forward, or a backward, which may repeat forwards: keep what weight gradients are made from."""
        self.microbatch = microbatch
        try:
            yield
        finally:
            self.microbatch = None

    def clear(self) -> None:
        """Forget what an earlier step has left."""
        self._pending.clear()
        self.end_check()

    def owes(self, microbatch: int) -> bool:
        """Return whether weight gradients of this microbatch are still to be computed."""
        return bool(self._pending.get(microbatch))

    @torch.no_grad()  # a host may receive gradients into tensors that require gradients
    def compute(self, microbatch: int, sampler: RowSampler | None = None) -> None:
        """Compute and accumulate the weight gradients of a microbatch, through the hooks on their parameters.

        With a ``sampler`` from the tokens that it draws.
        """
        pending = self._pending.pop(microbatch, deque())
        calls = Counter(parameter for call in pending for parameter in call.parameters)
        sums: Gradients = {}
        while pending:
            complete = self._add_up(pending.popleft(), sampler, calls, sums)
            for parameter in tuple(complete):
                _hand_over([complete.pop(parameter)], parameter)
        self._accumulated()

    def _add_up(
        self, call: _Pending, sampler: RowSampler | None, calls: Counter[torch.nn.Parameter], sums: Gradients
    ) -> Gradients:
        """Return gradients of the parameters that no later call uses. Those of the others wait in ``sums``.

        The host, too, first adds up the gradients of several calls in one backward.
        """
        complete: Gradients = {}
        for parameter, gradient in zip(call.parameters, self._gradients(call, sampler), strict=True):
            calls[parameter] -= 1
            total = sums.pop(parameter) + gradient if parameter in sums else gradient
            (sums if calls[parameter] else complete)[parameter] = total
        return complete

    def _gradients(self, call: _Pending, sampler: RowSampler | None) -> tuple[torch.Tensor, ...]:
        if sampler is None:
            return call.make(None)
        names, first = self._names[call.layer], call.layer.names[0]

        def choose(inputs: torch.Tensor, gradient: torch.Tensor, weight: str | None = None) -> Rows:
            return sampler.rows(names[weight or first], inputs, gradient)

        return call.make(choose)

    def keep(
        self,
        microbatch: int,
        layer: TappedLayer,
        parameters: tuple[torch.nn.Parameter, ...],
        make: Callable[[Choose | None], tuple[torch.Tensor, ...]],
    ) -> None:
        """A backward has reached a call of ``layer``: ``make`` computes the gradients of its parameters later."""
        self._pending.setdefault(microbatch, deque()).append(_Pending(layer, parameters, make))

    def tap(
        self,
        layer: TappedLayer,
        output: torch.Tensor,
        inputs: torch.Tensor,
        parameters: tuple[torch.nn.Parameter, ...],
    ) -> torch.Tensor:
        """``output`` without a copy; in its backward its gradient is kept with ``inputs``."""
        microbatch = self.microbatch
        assert microbatch is not None

        def keep(inputs: torch.Tensor, gradient: torch.Tensor) -> None:
            self.keep(microbatch, layer, parameters, make=partial(layer.gradients, parameters, inputs, gradient))

        tapped: torch.Tensor = _Tap.apply(keep, inputs.detach(), output, self.anchor)  # type: ignore[no-untyped-call]
        return tapped


def _layers(model: torch.nn.Module, make: Make) -> dict[str, TappedLayer]:
    """The layers of a model that ``make`` knows, by the model's names of their parameters.

    Layers that share a parameter with another one stay out: a tap sees only what passes its own layer. So do those
    with a forward of somebody else's, which may compute anything.
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
    """The tap of torch's own linear layer, if its weight is of this ``kind``; None for others.

    Not of a DTensor, for one, with which the layer computes: a rank has its shard only.
    """
    weight = vars(module)["_parameters"].get("weight")
    if type(module) is not torch.nn.Linear or type(weight) is not kind or not weight.requires_grad:
        return None
    if not weight.is_floating_point():
        return None
    return LinearTap(module)
