"""Weight gradients apart from the backward: the taps on one stage's layers.

``StageTaps.compute`` computes the weight gradients from what the taps have kept, from all tokens or a sample, in the
order in which a host would have accumulated them. Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", which
splits backwards into B and W.

A tap takes only the calls of a layer that it understands; the host computes all others. The life of a layer:

    watched     the first step, and audits: the host computes all, and the tap's gradients are compared (``tap_check``)
    tapped      once a gradient that was not zero has been the same in every bit
    left        the host computes it: the comparison failed, or something was seen that a tap does not understand
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol
from weakref import ref

import torch

from tf_adapters.weight_gradients.compiled_blocks import CompiledParts
from tf_adapters.weight_gradients.kept import Kept, seal
from tf_adapters.weight_gradients.reasons import OTHER_USES, PROVISIONAL, SAID, TAKEN_AT_ONCE
from tf_adapters.weight_gradients.stand_ins import StandIns
from tf_adapters.weight_gradients.tap_check import TapCheck
from tf_adapters.weight_gradients.tap_function import hand_over
from tf_adapters.weight_gradients.tapped_layer import Make, Parameters, TappedLayer, has_hooks
from tf_adapters.weight_gradients.tokens import Rows

MakeLayer = Callable[[torch.nn.Module], TappedLayer | None]
_Sum = tuple[int, torch.nn.Parameter]
"""A backward, by torch's number, and a parameter: the backward adds up its gradients before it accumulates them."""

_Total = tuple[torch.Tensor | None, int]
"""A parameter's ``.grad`` and the version of its values."""


class RowSampler(Protocol):
    """Chooses the rows from which the gradient of a ``weight``, given by the stage's name, is computed."""

    def rows(self, weight: str, inputs: torch.Tensor, gradient: torch.Tensor) -> Rows: ...


class _Pending(NamedTuple):
    """One call of a layer. ``make`` computes the gradients of its parameters from what is ``kept``."""

    backward: int  # the number of the one that has reached it, of which a microbatch may have several
    layer: TappedLayer
    parameters: Parameters
    make: Make
    kept: Sequence[Kept]

    @property
    def sums(self) -> list[_Sum]:
        """The sums that this call adds to, one for each of its parameters."""
        return [(self.backward, parameter) for parameter in self.parameters]


class StageTaps:
    """The taps on one stage's layers.

    Args:
        model: the stage's module.
        make: returns the tap of a layer; None for a layer without one.
        accumulated: called whenever a microbatch's weight gradients have been accumulated apart from a backward.
        by_name: whether a tapped call's graph has an edge to the weight itself, by which other code can ask for its
            gradient. The parameters must have no hooks of the host, since these would run in each backward. Without
            it, stand-ins get these gradients (``stand_ins``).
        sole: whether only autograd changes the parameters' ``.grad`` within a batch. If so, other changes are noticed.
        trusted: whether layers are tapped although no check has proven them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        make: MakeLayer,
        accumulated: Callable[[], None] = lambda: None,
        by_name: bool = False,
        sole: bool = False,
        trusted: bool = False,
    ) -> None:
        self._model, self._make, self._accumulated = ref(model), make, accumulated  # the taps keep no model alive
        self._known = frozenset(name for name, _ in model.named_parameters())
        self._installed = False
        self._find_layers(model)
        self._by_name, self._stand_ins = by_name, StandIns()
        self._sole, self._trusted = sole, trusted
        self.microbatch: int | None = None  # whose forward, loss or backward runs
        self.check: TapCheck | None = None  # in the step that is checked
        self.anchor = torch.zeros(0, requires_grad=True)  # so that a tap's backward runs
        self._paused = False  # whether the host computes all layers that are not checked
        self.recorded: set[int] = set()  # microbatches of this batch whose calls may be tapped
        self.untapped: int | None = None  # a microbatch of this batch that the host computes
        self.copied_bytes = 0  # in this step, by tensors that others could have changed
        self._left: dict[TappedLayer, str] = {}  # layers that are left to the host, and why
        self._proven: dict[TappedLayer, set[Hashable]] = {}  # tapped layers, and the kinds of their calls
        self._surprises: dict[TappedLayer, str] = {}  # layers that are left from the next step on
        self._pending: dict[int, deque[_Pending]] = {}
        self._kept: list[Kept] = []  # by the backward that runs
        self._totals: dict[torch.nn.Parameter, _Total] = {}  # as the last tapped call or weight gradient left them

    def _find_layers(self, model: torch.nn.Module) -> None:
        uses = Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))
        alone = partial(_alone, self._make, uses)
        self._compiled = CompiledParts(model, alone)
        layers = _layers(model, alone, self._compiled)
        self._layers = {name: layer for name, layer in layers.items() if name in self._known}
        self._prefixes = {layer: name[: name.rfind(".") + 1] for name, layer in self._layers.items()}

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters whose gradients may be computed apart."""
        return frozenset(name for name, layer in self._layers.items() if layer not in self._left)

    def install(self) -> None:
        for layer in self._prefixes:
            layer.install(self)
        self._compiled.install(self)
        self._installed = True

    def remove(self) -> None:
        self.end_check()
        for layer in self._prefixes:
            layer.remove()
        self._compiled.remove()
        self._installed = False

    # --- which layers are tapped -----------------------------------------------------------------------------

    def taps(self, layer: TappedLayer, kind: Hashable) -> bool:
        """Return whether a call of this kind of input is tapped."""
        if self.microbatch == self.untapped:
            return False
        if self._trusted:
            return layer not in self._left
        return not self._paused and kind in self._proven.get(layer, ())

    def surprised(self, layer: TappedLayer, reason: str) -> None:
        """Note that a tap has seen something that no check had: the host computes the layer from the next step on."""
        self._surprises.setdefault(layer, reason)

    def stop_watching(self) -> None:
        """Take the check's hooks from the parameters: the step is over."""
        if self.check is not None:
            self.check.stop_watching()

    def end_check(self) -> dict[str, str]:
        """End the step that is checked. Return why layers are left to the host, by name of their parameters."""
        check, self.check = self.check, None
        reasons = {} if check is None else check.end()
        reasons |= self._left | self._surprises
        for layer, kinds in check.kinds.items() if check is not None else ():
            if layer not in reasons:
                self._proven.setdefault(layer, set()).update(kinds)
        return {name: reasons[layer] for name, layer in self._layers.items() if layer in reasons}

    def leave(self, reasons: Mapping[str, str]) -> None:
        """Leave the layers of these parameters to the host from now on, for these reasons.

        A layer that is not proven yet is tried again in the next check.
        """
        for name, reason in reasons.items():
            layer = self._layers.get(name)
            if layer is not None:
                self._proven.pop(layer, None)
                if reason not in PROVISIONAL:
                    self._left[layer] = reason

    # --- what a step does ------------------------------------------------------------------------------------

    @contextmanager
    def checking(self, microbatch: int) -> Iterator[None]:
        """Run a part of the step that is checked: the host computes all, and the taps compare."""
        with self.recording(microbatch), self._check_without(self._left).looking(microbatch):
            yield

    @contextmanager
    def checking_again(self, microbatch: int, tapped: bool) -> Iterator[None]:
        """Run a part of a step that checks only the layers that are not proven. Others are ``tapped`` or not."""
        self._paused = not tapped
        try:
            with self.recording(microbatch), self._check_without(self._left | self._proven).looking(microbatch):
                yield
        finally:
            self._paused = False

    def _check_without(self, others: Collection[TappedLayer]) -> TapCheck:
        """Return the check that runs, or begin one of all layers but the ``others``."""
        if self.check is None:
            self.check = TapCheck({name: layer for name, layer in self._layers.items() if layer not in others})
        return self.check

    @contextmanager
    def recording(self, microbatch: int) -> Iterator[None]:
        """Run a forward, a loss or a backward of a microbatch, and keep what its weight gradients need."""
        self.recorded.add(microbatch)
        outer, self.microbatch = self.microbatch, microbatch
        kept_outside, self._kept = self._kept, []
        try:
            with self._stand_ins.asked(), self._compiled.around(self):
                yield
        finally:
            self.copied_bytes += seal(self._kept)
            self.microbatch, self._kept = outer, kept_outside

    def begin_batch(self) -> None:
        """Drop what the batch before has left: pending gradients if it failed, and its notes on ``.grad``.

        If other parts are compiled than before, the taps are put on anew. The host computes layers that no check has
        proven since.
        """
        model = self._model()
        if self._installed and model is not None and self._compiled.are_others(model):
            self.remove()
            self._find_layers(model)
            self.install()
        self.recorded.clear()
        self._pending.clear()
        self._totals.clear()
        if self.check is not None:
            self.check.begin_batch()

    def take_surprises(self) -> dict[str, str]:
        """Return what taps have seen since the last call, by name of their parameters."""
        surprises, self._surprises = self._surprises, {}
        self._left |= {layer: reason + SAID for layer, reason in surprises.items()}
        for layer in surprises:
            self._proven.pop(layer, None)
        return {name: surprises[layer] for name, layer in self._layers.items() if layer in surprises}

    @property
    def pending(self) -> tuple[int, ...]:
        """The microbatches whose weight gradients are still to be computed, in the order of their backwards."""
        return tuple(microbatch for microbatch, calls in self._pending.items() if calls)

    def waiting(self, microbatch: int) -> Collection[torch.nn.Parameter]:
        """Return the parameters whose gradients of a microbatch are still to be computed."""
        return [parameter for call in self._pending.get(microbatch, ()) for parameter in call.parameters]

    def keep(
        self, microbatch: int, layer: TappedLayer, parameters: Parameters, *, make: Make, kept: Sequence[Kept]
    ) -> None:
        """Note that a backward has reached a call of ``layer``. ``make`` computes its weight gradients later."""
        self._kept += kept
        call = _Pending(
            backward=torch._C._current_graph_task_id(), layer=layer, parameters=parameters, make=make, kept=kept
        )
        self._pending.setdefault(microbatch, deque()).append(call)

    def named(self, parameters: Parameters) -> Sequence[torch.Tensor]:
        """Return the tensors that get the gradients of these parameters if other code asks for them by name.

        A parameter with hooks stays out of the graph: they would run in each backward, with None for a gradient.
        """
        return [p if self._by_name and not has_hooks(p) else self._stand_ins.of(p) for p in parameters]

    def asked_by_name(self, layer: TappedLayer) -> None:
        """Note that other code asks for the gradients of a layer's parameters in the middle of a microbatch."""
        self.surprised(layer, TAKEN_AT_ONCE)
        if self._by_name:  # they may be accumulated: the host has accumulated earlier microbatches by now
            for microbatch in self.pending:
                self.compute(microbatch)

    @torch.no_grad()  # a host may receive gradients into tensors that require gradients
    def compute(self, microbatch: int, sampler: RowSampler | None = None) -> None:
        """Compute and accumulate the weight gradients of a microbatch, through the hooks on their parameters.

        They are computed from the rows that ``sampler`` returns, by default from all tokens.
        """
        pending = self._pending.pop(microbatch, deque())
        calls = Counter(place for call in pending for place in call.sums)
        sums: dict[_Sum, torch.Tensor] = {}
        while pending:
            call = pending.popleft()
            complete = self._add_up(call, sampler, calls, sums)
            for parameter in tuple(complete):
                self._accumulate(call.layer, parameter, [complete.pop(parameter)])
        self._accumulated()

    def _accumulate(self, layer: TappedLayer, parameter: torch.nn.Parameter, gradient: list[torch.Tensor]) -> None:
        if not self._sole:
            hand_over(gradient, parameter)
            return
        if parameter in self._totals and not _is_same(self._totals[parameter], _total(parameter)):
            self.surprised(layer, OTHER_USES)
        hand_over(gradient, parameter)
        self._totals[parameter] = _total(parameter)

    def host_accumulated(self) -> None:
        """Note that the host's own backward has added gradients of a microbatch.

        Forget no parameter: tapped calls of other microbatches may still wait for their backward. A change of ``.grad``
        by other code is noticed from here on too.
        """
        self._totals = {parameter: _total(parameter) for parameter in self._totals}

    def called(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note the parameters' ``.grad`` before the first tapped call of a batch: nobody else should change it."""
        for parameter in parameters if self._sole else ():
            if parameter not in self._totals:
                self._totals[parameter] = _total(parameter)

    def _add_up(
        self, call: _Pending, sampler: RowSampler | None, calls: Counter[_Sum], sums: dict[_Sum, torch.Tensor]
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Return gradients of the parameters that no later call of the same backward uses. Others wait in ``sums``.

        A host's backward also adds up the gradients of several calls before it accumulates them.
        """
        complete: dict[torch.nn.Parameter, torch.Tensor] = {}
        for place, gradient in zip(call.sums, self._gradients(call, sampler), strict=True):
            calls[place] -= 1
            total = sums.pop(place) + gradient if place in sums else gradient
            if calls[place]:
                sums[place] = total
            else:
                complete[place[1]] = total
        return complete

    def _gradients(self, call: _Pending, sampler: RowSampler | None) -> tuple[torch.Tensor, ...]:
        if sampler is None:
            return call.make(None)
        prefix = self._prefixes[call.layer]
        return call.make(lambda weight, inputs, gradient: sampler.rows(prefix + weight, inputs, gradient))


def _total(parameter: torch.nn.Parameter) -> _Total:
    total = parameter.grad
    return total, 0 if total is None else total._version


def _is_same(before: _Total, now: _Total) -> bool:
    return before[0] is now[0] and before[1] == now[1]


def _alone(make: MakeLayer, uses: Counter[int], module: torch.nn.Module) -> TappedLayer | None:
    """Return the tap of a layer that shares no parameter and has the forward of its class; None for others.

    A tap sees only the gradients that pass its own layer, and a forward that was replaced may compute anything.
    """
    if "forward" in vars(module) or any(uses[id(p)] > 1 for p in module.parameters(recurse=False)):
        return None
    return make(module)


def _layers(model: torch.nn.Module, make: MakeLayer, compiled: CompiledParts) -> dict[str, TappedLayer]:
    """Return the layers of a model that have a tap, by the model's names of their parameters."""
    layers: dict[str, TappedLayer] = {}
    for prefix, module in model.named_modules():
        layer = compiled.layers[module] if module in compiled.layers else make(module)
        if layer is not None:
            layers.update((f"{prefix}.{name}" if prefix else name, layer) for name in layer.names)
    return layers
