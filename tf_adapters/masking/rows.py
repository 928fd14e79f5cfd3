"""Row masking: a layer of which only some rows train computes the weight gradient of these rows alone.

While such a layer computes its output, its parameters have ``requires_grad=False``: the host's own layer then computes
input gradients and nothing else. Its output goes through a tap. The tap's backward hands the gradient of the output
down to the layer unchanged, and makes the gradient of the rows that train from it and from the layer's input. The
parameters require gradients again when the tap takes them up and while their gradient arrives.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tf_adapters.masking.parameters import ParameterMask
from tf_adapters.overrides import Overrides
from tf_adapters.selection.rows import FrozenRows
from tf_adapters.selection.units import FreezeUnit

Tensors = tuple[torch.Tensor, ...]
Gradients = Callable[[torch.Tensor, torch.Tensor], Tensors]
"""Gradients of a layer's parameters from the layer's input and the gradient of its output."""


class _Join(torch.autograd.Function):
    """A layer's output again, after which its gradient goes to the layer and to ``_Trained``."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
        return output.detach()  # no view of it: the host may change its layers' outputs in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient


class _Trained(torch.autograd.Function):
    """The parameters' gradients, from the gradient of the output.

    A node of its own, off the way to the layer's input: a backward that wants input gradients only does not run it.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: Gradients, inputs: torch.Tensor, output: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.gradients = gradients
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        return None, None, None, *ctx.gradients(inputs, gradient)


def tap(output: torch.Tensor, inputs: torch.Tensor, parameters: Tensors, gradients: Gradients) -> torch.Tensor:
    """``output`` without a copy; in its backward ``parameters`` get what ``gradients`` makes of its gradient."""
    trained = _Trained.apply(gradients, inputs.detach(), output.detach(), *parameters)  # type: ignore[no-untyped-call]
    return _Join.apply(output, trained)  # type: ignore[no-any-return, no-untyped-call]


class _TrainedRows(torch.autograd.Function):
    """A parameter that the host itself uses, without the gradient of frozen rows."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, rows: FrozenRows) -> torch.Tensor:
        ctx.rows = rows
        return parameter.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        for start, stop in ctx.rows.frozen:
            gradient[start:stop] = 0
        return gradient, None


def trained_rows(parameter: torch.Tensor, rows: FrozenRows) -> torch.Tensor:
    """``parameter`` without a copy; in its backward frozen rows get no gradient."""
    return _TrainedRows.apply(parameter, rows)  # type: ignore[no-any-return, no-untyped-call]


class RowLayer(ABC):
    """One layer some of whose rows can be frozen. A subclass says how gradients of the other rows are computed.

    ``names`` are the module's own names of the parameters that are frozen together: a weight ``[rows, inputs]``, with
    a bias ``[rows]`` where the host cannot train the one without the other. The module's forward takes the input first.
    """

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...] = ("weight",)) -> None:
        self.module, self.names = module, names
        self.frozen: FrozenRows | None = None  # now
        self._run = module.forward
        self._input = next(iter(inspect.signature(module.forward).parameters))
        self._overrides = Overrides()

    @abstractmethod
    def gradients(self, rows: FrozenRows, parameters: Tensors, inputs: torch.Tensor, gradient: torch.Tensor) -> Tensors:
        """Gradients of the parameters, in their shapes and types, zero in frozen rows."""

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.module.get_parameter(self.names[0]))

    def install(self) -> None:
        """Put ours into the place of the module's forward."""
        # A method, not a function: a deep copy of the model gets layers of its own with it.
        self._overrides.set(self.module, "forward", self.forward)

    def remove(self) -> None:
        """Give the module its own forward back."""
        self._overrides.restore()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with the tap on its output while some rows are frozen."""
        rows = self.frozen
        if rows is None or not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        # Looked up now: FSDP puts others into the parameters' place while the module computes.
        parameters = {name: self.module.get_parameter(name) for name in self.names}
        with ParameterMask(parameters).frozen(self.names):
            result = self._run(*args, **kwargs)
        return self.tapped(result, args[0] if args else kwargs[self._input], rows, tuple(parameters.values()))

    def tapped(self, result: Any, inputs: torch.Tensor, rows: FrozenRows, parameters: Tensors) -> Any:
        """What the module's forward returned, with the tap on its output."""
        return tap(result, inputs, parameters, partial(self.gradients, rows, parameters))


class LinearRows(RowLayer):
    """``torch.nn.Linear``. Its bias goes on by itself: the host trains or freezes it as it does without a tap."""

    def gradients(self, rows: FrozenRows, parameters: Tensors, inputs: torch.Tensor, gradient: torch.Tensor) -> Tensors:
        return (linear_gradient(rows, parameters[0], inputs, gradient),)


class EmbeddingRows(RowLayer):
    """``torch.nn.Embedding``, whose rows are tokens."""

    def gradients(self, rows: FrozenRows, parameters: Tensors, inputs: torch.Tensor, gradient: torch.Tensor) -> Tensors:
        frozen = is_frozen(rows, inputs)
        if self.module.padding_idx is not None:
            frozen |= inputs == self.module.padding_idx
        return (embedding_gradient(rows, parameters[0], inputs, skipped=frozen, gradient=gradient),)


def linear_gradient(
    rows: FrozenRows, weight: torch.Tensor, inputs: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Gradient of a weight ``[rows, inputs]``: one product for each span of rows that trains, zeros elsewhere."""
    flat = gradient.reshape(-1, rows.total)
    inputs = inputs.reshape(-1, inputs.shape[-1]).to(flat.dtype)  # under autocast the layer computed in another type
    found = flat.new_empty(weight.shape)
    for start, stop in rows.trained:
        torch.mm(flat[:, start:stop].t(), inputs, out=found[start:stop])
    for start, stop in rows.frozen:
        found[start:stop].zero_()
    return found.to(weight.dtype)


def bias_gradient(rows: FrozenRows, bias: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Gradient of a bias ``[rows]``, zero in frozen rows."""
    flat, found = gradient.reshape(-1, rows.total), torch.zeros_like(bias)
    for start, stop in rows.trained:
        found[start:stop] = flat[:, start:stop].sum(0)
    return found


def is_frozen(rows: FrozenRows, tokens: torch.Tensor) -> torch.Tensor:
    """Whether the row of each token is frozen."""
    return (tokens - rows.first) % rows.total < rows.count


def embedding_gradient(
    rows: FrozenRows, weight: torch.Tensor, tokens: torch.Tensor, skipped: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Gradient of a table ``[rows, width]`` from all tokens but those at ``skipped`` (bools of the tokens' shape).

    The host's own kernel passes by one row: what is skipped is looked up there, and the row is a frozen one.
    """
    looked_up = tokens.masked_fill(skipped, rows.first)
    return torch.ops.aten.embedding_dense_backward(  # type: ignore[no-any-return]
        gradient.to(weight.dtype), looked_up, rows.total, padding_idx=rows.first, scale_grad_by_freq=False
    )


RowLayers = dict[tuple[str, ...], RowLayer]
"""Layers by the names that a stage has for their parameters."""


class RowMask:
    """Freezes rows of one stage's layers, whose forwards it replaces until ``remove``."""

    def __init__(self, layers: RowLayers) -> None:
        self._layers = layers
        for layer in layers.values():
            layer.install()

    @property
    def rows(self) -> dict[tuple[str, ...], int]:
        """How many rows each layer has."""
        return {names: layer.rows for names, layer in self._layers.items()}

    def remove(self) -> None:
        """Give the layers their own forwards back."""
        for layer in self._layers.values():
            layer.remove()

    @contextmanager
    def frozen(self, rows: Iterable[FrozenRows]) -> Iterator[None]:
        """Freeze ``rows`` in the forwards inside the block, those that a backward repeats included."""
        held = [(self._layers[of_unit.names], of_unit) for of_unit in rows]
        for layer, of_unit in held:
            layer.frozen = of_unit
        try:
            yield
        finally:
            for layer, _ in held:
                layer.frozen = None


def with_rows(
    units: Mapping[int, Sequence[FreezeUnit]], masks: Mapping[int, RowMask]
) -> dict[int, tuple[FreezeUnit, ...]]:
    """The units of this rank's stages, told how many rows the masks can freeze of them."""
    rows = {stage: mask.rows for stage, mask in masks.items()}
    return {
        stage: tuple(replace(unit, rows=rows.get(stage, {}).get(unit.names, 0)) for unit in of_stage)
        for stage, of_stage in units.items()
    }


def row_layers(model: torch.nn.Module, make: Callable[[torch.nn.Module], RowLayer | None]) -> RowLayers:
    """The layers of a model that ``make`` knows to freeze by rows, by the model's names of their parameters.

    Layers that share a parameter with another one stay out: a tap sees only what passes its own layer. So do those
    with a forward of somebody else's, which may compute anything.
    """
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    found: RowLayers = {}
    for prefix, module in model.named_modules():
        if "forward" not in vars(module) and all(uses[id(p)] == 1 for p in module.parameters(recurse=False)):
            layer = make(module)
            if layer is not None:
                found[tuple(f"{prefix}.{name}" if prefix else name for name in layer.names)] = layer
    return found


def plain_layer(module: torch.nn.Module) -> RowLayer | None:
    """Rows of torch's own linear and embedding layers; None for others."""
    weight = vars(module)["_parameters"].get("weight")
    # Not a DTensor, for one: a rank has its shard only.
    return layer_of_kind(module, type(module)) if type(weight) is torch.nn.Parameter else None


def layer_of_kind(module: torch.nn.Module, kind: type) -> RowLayer | None:
    """Rows of a module that computes as ``kind`` does, if that is a linear or embedding layer that trains.

    None for a table that is clipped by norm, has sparse gradients or scales them by frequency.
    """
    if kind not in (torch.nn.Linear, torch.nn.Embedding):
        return None
    weight = module.get_parameter("weight")
    if not weight.requires_grad or len(weight) < 2:
        return None
    if kind is torch.nn.Linear:
        return LinearRows(module)
    options = vars(module)
    special = options["max_norm"] is not None or options["sparse"] or options["scale_grad_by_freq"]
    return None if special else EmbeddingRows(module)
