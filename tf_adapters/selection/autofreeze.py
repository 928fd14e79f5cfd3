"""AutoFreeze: the first layers of the model whose gradient norm has settled are stable (paper section 2.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.units import FreezeUnit
from tf_adapters.selection.updates import Memory, Updates


def layers_of(units: Mapping[int, Sequence[FreezeUnit]]) -> np.ndarray:
    """The layer of every unit of all stages, in order (int64 ``[units]``), counted from the model's first.

    A layer is what a parameter's name says up to its first number, on its stage ("layers.3" of
    "layers.3.attention.wq.weight"), or without a number up to its last part ("norm" of "norm.weight").
    """
    numbers: dict[tuple[int, str], int] = {}
    named = [(stage, _layer(unit.names[0])) for stage in sorted(units) for unit in units[stage]]
    return np.array([numbers.setdefault(layer, len(numbers)) for layer in named], np.int64)


def _layer(name: str) -> str:
    parts = name.split(".")
    first = next((position for position, part in enumerate(parts) if part.isdigit()), max(0, len(parts) - 2))
    return ".".join(parts[: first + 1])


@dataclass(frozen=True)
class AutoFreeze:
    """Tells which layers are stable, from check to check; the whole model's layers are compared with each other.

    At the K-th check a layer's score is | |Delta_{K-1}| - |Delta_K| | / |Delta_{K-1}|, of L2 norms over all of its
    elements, estimated from the sampled ones. A layer becomes stable when its score is among the lowest ``percentile``
    percent of all layers' and every layer before it is stable. It stays so: the method only ever freezes more. What is
    stable already counts as unchanged, so no more than ``percentile`` percent of the layers ever are.
    """

    layers: np.ndarray
    percentile: float

    def check(self, memory: Memory, updates: Updates) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The memory for the next check, and which units are stable: bools ``[units]``."""
        norms = self.norms(updates)
        prefix = int(memory["prefix"][0]) if "prefix" in memory else 0
        before = memory.get("norms")
        scores = np.zeros(0) if before is None else _changes(before, norms, prefix)
        prefix = self._extended(prefix, scores)
        return {"norms": norms, "prefix": np.array([prefix]), "scores": scores}, self.layers < prefix

    def norms(self, updates: Updates) -> np.ndarray:
        """Estimated |Delta_K| of each layer, an L2 norm; NaN, so that it is never stable, where nothing was read."""
        count = 1 + int(self.layers.max(initial=-1))
        squares, read = (np.bincount(self.layers, of, count) for of in (updates.sums(updates.delta**2), updates.numel))
        norms: np.ndarray = np.where(read > 0, np.sqrt(squares), np.nan)
        return norms

    def _extended(self, prefix: int, changes: np.ndarray) -> int:
        """The stable prefix, in layers, after a check with these scores."""
        lowest = int(len(changes) * self.percentile / 100.0 + 1e-9)
        settled = set(np.argsort(changes, kind="stable")[:lowest].tolist())
        while prefix in settled:
            prefix += 1
        return prefix


def _changes(before: np.ndarray, norms: np.ndarray, prefix: int) -> np.ndarray:
    """Gradient-norm change of each layer: 0 for stable ones and those at rest, infinite for one that began to move.

    NaN, and so among the highest, for one whose weights are not finite or not read.
    """
    with np.errstate(invalid="ignore"):
        moved = np.abs(before - norms)
        changes: np.ndarray = np.divide(moved, before, out=np.where(moved == 0.0, 0.0, np.inf), where=before > 0.0)
    changes[:prefix] = 0.0
    return changes
