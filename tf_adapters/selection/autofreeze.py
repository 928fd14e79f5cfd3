"""AutoFreeze: the first layers of the model whose gradient norm has settled are stable (paper section 2.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.updates import Memory, Updates


def layers_of(units: Mapping[int, Sequence[FreezeUnit]]) -> np.ndarray:
    """Return the layer number of every unit of all stages, in order (int64 ``[units]``), from 0.

    A layer's name is the part of a parameter's name that ends with its first number: "layers.3" of
    "layers.3.attention.wq.weight". Without a number it is the name without its last part: "norm" of "norm.weight".
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
    """Finds the stable layers at each check, by comparing all layers of the model.

    At the K-th check a layer's score is | |Delta_{K-1}| - |Delta_K| | / |Delta_{K-1}|. The norms are L2 norms over all
    elements of the layer, estimated from the sampled ones. A layer becomes stable when its score is among the lowest
    ``percentile`` percent of all layers and every earlier layer is stable. It then stays stable. Stable layers count as
    unchanged, so at most ``percentile`` percent of the layers become stable.
    """

    layers: np.ndarray
    percentile: float

    def check(self, memory: Memory, updates: Updates) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the memory for the next check, and the stable units as bools ``[units]``."""
        norms = self.norms(updates)
        prefix = int(memory["prefix"][0]) if "prefix" in memory else 0
        before = memory.get("norms")
        scores = np.zeros(0) if before is None else _changes(before, norms, prefix)
        prefix = self._extended(prefix, scores)
        return {"norms": norms, "prefix": np.array([prefix]), "scores": scores}, self.layers < prefix

    def norms(self, updates: Updates) -> np.ndarray:
        """Estimate |Delta_K| of each layer, an L2 norm. It is NaN, so never stable, if nothing was read."""
        count = 1 + int(self.layers.max(initial=-1))
        squares, read = (np.bincount(self.layers, of, count) for of in (updates.sums(updates.delta**2), updates.numel))
        norms: np.ndarray = np.where(read > 0, np.sqrt(squares), np.nan)
        return norms

    def _extended(self, prefix: int, changes: np.ndarray) -> int:
        """Return the number of stable layers after a check with these scores."""
        lowest = int(len(changes) * self.percentile / 100.0 + 1e-9)
        settled = set(np.argsort(changes, kind="stable")[:lowest].tolist())
        while prefix in settled:
            prefix += 1
        return prefix


def _changes(before: np.ndarray, norms: np.ndarray, prefix: int) -> np.ndarray:
    """Relative change of each layer's norm.

    It is 0 for a stable layer and for one that never moved, and infinite for one that began to move. It is NaN, which
    sorts last, for a layer whose weights are not finite or were not read.
    """
    with np.errstate(invalid="ignore"):
        moved = np.abs(before - norms)
        changes: np.ndarray = np.divide(moved, before, out=np.where(moved == 0.0, 0.0, np.inf), where=before > 0.0)
    changes[:prefix] = 0.0
    return changes
