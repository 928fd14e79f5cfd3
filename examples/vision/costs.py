"""What each layer of a model costs, measured: parameters, activations kept for the backward, time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tf_adapters.measuring.estimates import median
from tf_adapters.measuring.timer import ActionTimer, clock_for
from tf_adapters.schedule.ir import Action, Kind

WARM_UP = 3
_PHASE = "costs"


@dataclass(frozen=True)
class LayerCost:
    """One layer's `parameters` (elements), and for one microbatch: bytes that autograd keeps, and median times."""

    name: str
    parameters: int
    activation_bytes: int
    forward_ms: float
    backward_ms: float


def measure(
    layers: Sequence[nn.Module],
    inputs: Tensor,
    labels: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    repeats: int = 20,
) -> tuple[LayerCost, ...]:
    """Run one microbatch through `layers` a few times, on its own device. The loss belongs to the last layer."""
    inputs, last = inputs.clone(), layers[-1]  # a slice would keep the whole data set
    functions = [*layers[:-1], lambda x: loss_fn(last(x), labels)]
    timer = ActionTimer(clock_for(inputs.device), keep=repeats)  # the newest ones: warm-up falls out
    for _ in range(WARM_UP + repeats):
        _forward_and_backward(functions, inputs, timer)
        timer.drain(wait=True)
    kept = _activation_bytes(functions, layers, inputs)
    return tuple(
        LayerCost(
            name=type(layer).__name__,
            parameters=sum(parameter.numel() for parameter in layer.parameters()),
            activation_bytes=kept[index],
            forward_ms=_median_ms(timer, Kind.FORWARD, index),
            backward_ms=_median_ms(timer, Kind.BACKWARD, index),
        )
        for index, layer in enumerate(layers)
    )


def _forward_and_backward(functions: Sequence[Callable[[Tensor], Tensor]], x: Tensor, timer: ActionTimer) -> None:
    """One microbatch. Each layer's backward ends at its input, as if it were a pipeline stage."""
    ran = []
    for index, function in enumerate(functions):
        x = x.detach().requires_grad_(index > 0)  # images need no gradient
        with timer.timed(_PHASE, Action(index, Kind.FORWARD, 0), share=0.0):
            output = function(x)
        ran.append((x, output))
        x = output
    gradient = None
    for index, (x, output) in reversed(list(enumerate(ran))):
        with timer.timed(_PHASE, Action(index, Kind.BACKWARD, 0), share=0.0):
            output.backward(gradient)
        gradient = x.grad


def _median_ms(timer: ActionTimer, kind: Kind, index: int) -> float:
    ms = median(sample.ms for sample in timer.samples(_PHASE, Action(index, kind, 0)))
    assert ms is not None
    return ms


def _activation_bytes(
    functions: Sequence[Callable[[Tensor], Tensor]], layers: Sequence[nn.Module], x: Tensor
) -> list[int]:
    """Bytes of the storages that autograd keeps for each layer's backward, the parameters' own left out."""
    kept = []
    for index, (function, layer) in enumerate(zip(functions, layers, strict=True)):
        storages: dict[int, int] = {}

        def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            x = function(x.detach().requires_grad_(index > 0))
        for parameter in layer.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        kept.append(sum(storages.values()))
    return kept
