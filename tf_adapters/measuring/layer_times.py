"""Time each layer of a stage, forward and backward. `tf-adapters balance` cuts a model by these times.

Hooks mark moments while an action runs. The time between two marks belongs to the layer of the first mark. A forward
hook marks a layer's start and end. In a backward, a layer starts when the gradient of its output has been computed, or
when its forward runs again for recomputation. No hook changes a value or the graph.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tf_adapters.measuring.estimates import median
from tf_adapters.measuring.timer import Clock
from tf_adapters.schedule.durations import Count, Milliseconds
from tf_adapters.schedule.ir import Action, Kind

if TYPE_CHECKING:
    import torch

Layers = Mapping[str, "torch.nn.Module"]
"""A stage's layers by name. No layer is inside another."""
_REST, _WEIGHTS = "", "weight gradients"
_ACTIONS = 16
"""Number of samples that are kept for each stage and kind."""

_Marks = list[tuple[str, Any]]
"""(Name of the part that begins, mark) of one action; the last mark is its end."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer of a stage: ms per microbatch, and the number of elements of its parameters on this rank."""

    name: str
    forward_ms: Milliseconds
    backward_ms: Milliseconds
    parameters: Count


@dataclass(frozen=True, slots=True)
class StageLayers:
    """A stage's layers in order of computation. ``rest_*_ms`` is the time outside of all layers."""

    layers: tuple[LayerTime, ...]
    rest_forward_ms: Milliseconds
    rest_backward_ms: Milliseconds


class LayerTimer:
    """Times the layers of this rank's stages while it is on, with the clock of the actions.

    It stores only the sizes of the layers, so a later report keeps no model alive.
    """

    def __init__(self, layers: Mapping[int, Layers], clock: Clock) -> None:
        self._clock = clock
        self._sizes = {
            stage: {name: sum(p.numel() for p in layer.parameters()) for name, layer in of_stage.items()}
            for stage, of_stage in layers.items()
        }
        self._hooks: list[Any] = []
        self._stage: int | None = None  # stage of the current action
        self._current: _Marks = []  # its marks
        self._order: dict[int, dict[str, None]] = defaultdict(dict)  # order in which a stage's layers compute
        self._samples: dict[tuple[int, Kind], deque[_Marks]] = defaultdict(lambda: deque(maxlen=_ACTIONS))

    def on(self, layers: Mapping[int, Layers]) -> None:
        for stage, of_stage in layers.items() if not self._hooks else ():
            for name, layer in of_stage.items():
                self._hooks.append(layer.register_forward_pre_hook(self._entering(stage, name)))
                self._hooks.append(layer.register_forward_hook(self._leaving(stage, name)))

    def off(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    @contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        """Time an action inside. An action that raises leaves no sample."""
        if not self._hooks:
            yield
            return
        self._stage, self._current = action.stage, []
        self._mark(_WEIGHTS if action.kind is Kind.WEIGHT_GRAD else _REST)
        try:
            yield
            self._mark(_REST)
            self._samples[action.stage, action.kind].append(self._current)
        finally:
            self._stage = None

    def weight_gradients(self) -> None:
        """Mark that the rest of the action computes weight gradients of all of the stage's layers."""
        self._mark(_WEIGHTS)

    def times(self) -> dict[int, StageLayers]:
        """Measured times by stage, for stages whose forwards and backwards were measured."""
        return {stage: of for stage in self._sizes if (of := self._measured(stage)) is not None}

    def _measured(self, stage: int) -> StageLayers | None:
        forward = self._medians(self._samples[stage, Kind.FORWARD])
        whole = self._medians(self._samples[stage, Kind.BACKWARD])
        backward = whole or self._medians(self._samples[stage, Kind.INPUT_GRAD])
        if not forward or not backward:
            return None
        apart = self._medians(self._samples[stage, Kind.WEIGHT_GRAD]) if not whole else {}
        weights = backward.get(_WEIGHTS, 0.0) + apart.get(_WEIGHTS, 0.0)
        sizes = {name: self._sizes[stage][name] for name in self._order[stage]}
        every = max(1, sum(sizes.values()))
        return StageLayers(
            layers=tuple(
                LayerTime(name, forward.get(name, 0.0), backward.get(name, 0.0) + weights * size / every, size)
                for name, size in sizes.items()
            ),
            rest_forward_ms=forward.get(_REST, 0.0),
            rest_backward_ms=backward.get(_REST, 0.0),
        )

    def _medians(self, samples: Iterable[_Marks]) -> dict[str, float]:
        """Median time of each part over the actions that the device has passed."""
        by_name: dict[str, list[float]] = defaultdict(list)
        for marks in samples:
            if self._clock.elapsed_ms(marks[0][1], marks[-1][1]) is None:
                continue
            sums: dict[str, float] = defaultdict(float)
            for (name, start), (_, stop) in pairwise(marks):
                sums[name] += self._clock.elapsed_ms(start, stop) or 0.0
            for name, total in sums.items():
                by_name[name].append(total)
        return {name: ms for name, values in by_name.items() if (ms := median(values)) is not None}

    def _mark(self, name: str) -> None:
        if self._stage is not None:
            self._current.append((name, self._clock.mark()))

    def _entering(self, stage: int, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self._stage == stage:  # two stages of a rank may share a layer
                self._order[stage].setdefault(name)
                self._mark(name)

        return hook

    def _leaving(self, stage: int, name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if self._stage != stage:
                return
            self._mark(_REST)
            tensor = next((t for t in _tensors(output) if t.requires_grad), None)
            if tensor is not None:
                tensor.register_hook(lambda gradient: self._mark(name))

        return hook


def _tensors(output: Any) -> Iterator[Any]:
    if hasattr(output, "register_hook"):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
