"""Stability checks: every rank's part of the model is read, gathered, and judged once for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from tf_adapters.collectives import Collectives, on_all_ranks, on_one_rank
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.selection.apf import Apf
from tf_adapters.selection.autofreeze import AutoFreeze, layers_of
from tf_adapters.selection.encoding import decode, encode
from tf_adapters.selection.sampling import HeldValues, PieceKey, PieceReading, read
from tf_adapters.selection.units import FreezeUnit
from tf_adapters.selection.updates import Memory, Snapshot, Updates, by_stage, unit_places

Units = Mapping[int, Sequence[FreezeUnit]]


class StabilityMetric(Protocol):
    """APF or AutoFreeze: which units are stable, given how far each has moved since the last check."""

    def check(self, memory: Memory, updates: Updates) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The memory for the next check, and bools ``[units]``."""

    def resharded(self, memory: Memory) -> dict[str, np.ndarray]:
        """What of the memory still holds once other elements are sampled."""


@dataclass(frozen=True, eq=False)
class StabilityState:
    """What is stable as of the last check, and what the next one needs; the same on every rank.

    ``stable`` holds indices of units by stage, ``memory`` the metric's own arrays.
    """

    checks: int = 0
    stable: Mapping[int, frozenset[int]] = field(default_factory=dict)
    memory: Mapping[str, np.ndarray] = field(default_factory=dict)
    snapshot: Snapshot | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StabilityState) and self.to_json() == other.to_json()

    def to_json(self) -> dict[str, Any]:
        return {
            "checks": self.checks,
            "stable": {str(stage): sorted(units) for stage, units in self.stable.items()},
            "memory": {name: encode(array) for name, array in self.memory.items()},
            "snapshot": self.snapshot.to_json() if self.snapshot else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> StabilityState:
        if data is None:
            return cls()
        return cls(
            checks=data["checks"],
            stable={int(stage): frozenset(units) for stage, units in data["stable"].items()},
            memory={name: decode(array) for name, array in data["memory"].items()},
            snapshot=Snapshot.from_json(data["snapshot"]) if data["snapshot"] else None,
        )


class StabilityChecks:
    """The checks of one run on one rank.

    Args:
        config: the settings; where their method asks for no stability metric, no check is ever due.
        units: the freezable units of every stage, the same on every rank.
        stages: this rank's stages.
        held: what this rank holds of their parameters.
        collectives: the group of all ranks that train together.
    """

    def __init__(
        self,
        config: TimelyFreezeConfig,
        units: Units,
        stages: Iterable[int],
        held: HeldValues,
        collectives: Collectives,
    ) -> None:
        self._interval, self._seed = config.stability_check_interval, config.seed
        self._units, self._stages, self._held = units, tuple(stages), held
        self._collectives = collectives
        self._places = unit_places(units)
        self._metric = metric_of(config, units)

    def due(self, step: int, start: int) -> bool:
        """Whether a check follows step ``step``, the first step that may freeze being ``start`` + 1."""
        return self._metric is not None and step >= start and (step - start) % self._interval == 0

    def run(self, state: StabilityState, step: int, start: int) -> StabilityState:
        """The state after the check that follows ``step``. Called on all ranks.

        Where freezing starts, or the sharding has changed, there is nothing to compare with: the model is only read.
        Raises TimelyFreezeError, the same on all ranks, if it fails on one.
        """
        metric = self._metric
        if metric is None:
            return state
        snapshot = self.read()
        before = state.snapshot
        if before is not None and not before.matches(snapshot):
            return replace(state, snapshot=snapshot, memory=metric.resharded(state.memory))
        if step == start or before is None:
            return replace(state, snapshot=snapshot)
        updates = Updates.between(before, snapshot, self._places)
        # One rank decides: another processor might round its sums otherwise.
        memory, stable = on_one_rank(self._collectives, lambda: metric.check(state.memory, updates))
        return StabilityState(state.checks + 1, by_stage(self._units, stable), memory, snapshot)

    def read(self) -> Snapshot:
        """The whole model as all ranks together hold it now. Called on all ranks.

        What several ranks hold is read by one of them, by each in turn: ranks then send about as much as each other.
        """
        holders: dict[PieceKey, list[int]] = {}
        for rank, keys in enumerate(on_all_ranks(self._collectives, lambda: tuple(key for key, _ in self._pieces()))):
            for key in keys:
                holders.setdefault(key, []).append(rank)
        readers = {key: holders[key][turn % len(holders[key])] for turn, key in enumerate(sorted(holders))}
        merged: dict[PieceKey, PieceReading] = {}
        for readings in on_all_ranks(self._collectives, lambda: self._read_local(readers)):
            merged.update(readings)
        return Snapshot.of(merged, self._seed)

    def _read_local(self, readers: Mapping[PieceKey, int]) -> dict[PieceKey, PieceReading]:
        """What this rank reads for all."""
        rank = self._collectives.rank
        return read(self._seed, ((key, values) for key, values in self._pieces() if readers[key] == rank))

    def _pieces(self) -> Iterator[tuple[PieceKey, torch.Tensor]]:
        """Everything that this rank holds of its stages' units."""
        for stage in self._stages:
            for unit in self._units[stage]:
                for name in unit.names:
                    for piece in self._held(stage, name):
                        yield (stage, name, piece.part), piece.values


def metric_of(config: TimelyFreezeConfig, units: Units) -> StabilityMetric | None:
    """The metric that the settings name, for a model of these units; None where they name none."""
    if config.stability_metric == "autofreeze":
        return AutoFreeze(layers_of(units), config.autofreeze_percentile)
    if config.stability_metric == "apf":
        return Apf(config.apf_threshold, config.apf_alpha, config.apf_score, periods=not config.plans)
    return None
