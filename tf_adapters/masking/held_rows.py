"""Rows that a whole step froze: as whole parameters do, they take no update in it, neither momentum nor decay.

An optimizer has one gradient and one state for all of a tensor, so it cannot pass by some of its rows. What it makes of
them is taken back after its step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tf_adapters.selection.masks import Mask
from tf_adapters.selection.rows import FrozenRows, Span


@dataclass(frozen=True)
class HeldRows:
    """Rows of a parameter that every microbatch of a step froze."""

    parameter: torch.nn.Parameter
    rows: tuple[Span, ...]

    @property
    def width(self) -> int:
        """Elements of one row."""
        return math.prod(self.parameter.shape[1:])

    def of(self, tensor: torch.Tensor, begin: int = 0) -> list[torch.Tensor]:
        """These rows' elements in a copy or a contiguous shard of the parameter; flat views.

        ``begin`` is the (flat) element of the parameter that the shard begins with.
        """
        flat, width = tensor.view(-1), self.width
        spans = ((max(0, start * width - begin), min(flat.numel(), stop * width - begin)) for start, stop in self.rows)
        return [flat[start:stop] for start, stop in spans if start < stop]


class Kept:
    """Values as they were when they were kept."""

    def __init__(self) -> None:
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember the values of these tensors or views."""
        self._values += [(tensor.detach(), tensor.detach().clone()) for tensor in tensors]

    def put_back(self) -> None:
        """Give all that was kept its values back, and forget them."""
        for tensor, value in self._values:
            tensor.copy_(value)  # both are detached
        self._values.clear()


def updated_with(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor that an optimizer updates, and what its state has element for element."""
    state = optimizer.state.get(tensor, {})
    return [tensor.detach(), *(s for s in state.values() if torch.is_tensor(s) and s.shape == tensor.shape)]


def frozen_by_all(masks: Iterable[Mask]) -> dict[str, tuple[Span, ...]]:
    """Rows that each of the masks freezes, by name, of parameters that at least one freezes in part."""
    whole_and_part = [(frozenset(mask.names), dict(_by_name(mask))) for mask in masks]
    found = {}
    for name, total in {name: part.total for _, parts in whole_and_part for name, part in parts.items()}.items():
        if not all(name in whole or name in parts for whole, parts in whole_and_part):
            continue  # some mask trains all of it
        frozen = np.ones(total, bool)
        for whole, parts in whole_and_part:
            if name not in whole:
                frozen &= _flags(parts[name])
        if frozen.any():
            found[name] = _spans(frozen)
    return found


def _by_name(mask: Mask) -> Iterator[tuple[str, FrozenRows]]:
    for part in mask.rows:
        for name in part.names:
            yield name, part


def _flags(part: FrozenRows) -> np.ndarray:
    flags = np.zeros(part.total, bool)
    for start, stop in part.frozen:
        flags[start:stop] = True
    return flags


def _spans(flags: np.ndarray) -> tuple[Span, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))
