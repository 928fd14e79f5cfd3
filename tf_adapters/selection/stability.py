"""Stability checks: every rank samples its part of the model, and rank 0 decides for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tf_adapters.collectives import Collectives, decide_from_all, share_from_all
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.selection.apf import Apf
from tf_adapters.selection.autofreeze import AutoFreeze, layers_of
from tf_adapters.selection.encoding import decode, encode
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.readers import Held, Readers, sizes_of
from tf_adapters.selection.sampling import HeldValues, PieceKey, read
from tf_adapters.selection.updates import Memory, Snapshot, Updates, by_stage, unit_places

Units = Mapping[int, Sequence[FreezeUnit]]


@dataclass(frozen=True, eq=False)
class StabilityState:
    """The result of the last check, and the data that the next one needs.

    ``checks`` is the number of checks, ``stable`` has the indices of stable units by stage, and ``begun`` says whether
    the model has been read: these are equal on all ranks. Only rank 0 has ``memory``, the metric's arrays, and
    ``snapshot``.
    """

    checks: int = 0
    stable: Mapping[int, frozenset[int]] = field(default_factory=dict)
    begun: bool = False
    memory: Mapping[str, np.ndarray] = field(default_factory=dict)
    snapshot: Snapshot | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StabilityState) and self.to_json() == other.to_json()

    def to_json(self) -> dict[str, Any]:
        return {
            "checks": self.checks,
            "stable": {str(stage): sorted(units) for stage, units in self.stable.items()},
            "begun": self.begun,
            "memory": {name: encode(array) for name, array in self.memory.items()},
            "snapshot": self.snapshot.to_json() if self.snapshot else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> StabilityState:
        """The inverse of ``to_json``.

        The data that only rank 0 needs is left out if it is unreadable. The model is then read again.
        """
        if data is None:
            return cls()
        begun = data.get("begun", data.get("snapshot") is not None)  # old: snapshot on all ranks
        stable = {int(stage): frozenset(units) for stage, units in data["stable"].items()}
        shared = cls(data["checks"], stable, begun)
        try:
            memory = {name: decode(array) for name, array in data["memory"].items()}
            snapshot = Snapshot.from_json(data["snapshot"]) if data["snapshot"] else None
        except (AttributeError, LookupError, TypeError, ValueError):
            return shared
        return replace(shared, memory=memory, snapshot=snapshot)


def without_evidence(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``to_json`` of rank 0 without the data that only rank 0 needs. This data is most of its several MB."""
    return {**data, "begun": data.get("begun", data.get("snapshot") is not None), "memory": {}, "snapshot": None}


class StabilityChecks:
    """The checks of one run on one rank.

    Args:
        config: the settings. If the method has no stability metric, no check is ever due.
        units: the freezable units of every stage, the same on every rank.
        stages: this rank's stages.
        held: returns this rank's pieces of their parameters.
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
        self._order = {parameter: place for place, parameter in enumerate(self._places)}
        self._metric = metric_of(config, units)
        self._known: Held | None = None  # this rank's pieces when readers were chosen; None on all ranks or on no rank
        self._sizes: list[int] = []  # sample sizes of this rank's pieces
        self._readers: Readers | None = None  # on rank 0 only

    def due(self, step: int, start: int) -> bool:
        """Return whether a check follows step ``step``. ``start`` + 1 is the first step that may freeze."""
        return self._metric is not None and step >= start and (step - start) % self._interval == 0

    def run(self, state: StabilityState, step: int, start: int) -> StabilityState:
        """Return the state after the check that follows ``step``. Called on all ranks.

        When freezing starts, and after a change of the sharding, the model is only read: there is no earlier snapshot
        to compare with. Rank 0 alone decides, since another processor might round sums differently. Raises
        TimelyFreezeError, the same on all ranks, if the check fails on one.
        """
        metric = self._metric
        if metric is None:
            return state
        judged: list[tuple[Memory, Snapshot]] = []

        def judge(readings: Sequence[bytes | None]) -> bytes | None:
            """Return one bit per unit, set if it is stable; no bits if the model was only read.

            Return None if the pieces of one rank have changed.
            """
            read = [reading for reading in readings if reading is not None]
            if len(read) < len(readings):
                return None
            assert self._readers is not None
            snapshot = self._readers.snapshot(read, self._seed)
            before, memory, stable = state.snapshot, state.memory, np.zeros(0, bool)
            if before is not None and before.matches(snapshot) and step != start:
                memory, stable = metric.check(memory, Updates.between(before, snapshot, self._places))
            judged.append((memory, snapshot))
            return np.packbits(stable).tobytes()

        for _ in range(2):  # the second time with new readers, if a rank's pieces have changed
            if self._known is None:
                self._choose_readers()
            bits = decide_from_all(self._collectives, self._read, judge)
            if bits is not None:
                break
            self._known = None
        else:
            return state
        memory, snapshot = judged[0] if judged else ({}, None)
        read_now = replace(state, begun=True, memory=memory, snapshot=snapshot)
        if not bits:
            return read_now
        stable = by_stage(self._units, np.unpackbits(np.frombuffer(bits, np.uint8)).astype(bool))
        return replace(read_now, checks=state.checks + 1, stable=stable)

    def _choose_readers(self) -> None:
        """Choose the reader of each piece. Called on all ranks: each sends its pieces and receives its sample sizes."""
        mine: list[Held] = []

        def local() -> Held:
            mine.append(self._held_now(self._pieces()))
            return mine[0]

        def choose(held: Sequence[Held]) -> list[bytes]:
            self._readers, told = Readers.of(held, list(self._order))
            return told

        told = share_from_all(self._collectives, local, choose)
        self._known, self._sizes = mine[0], sizes_of(told, len(mine[0][0]))

    def _read(self) -> bytes | None:
        """Read this rank's share for all ranks; return None if its pieces have changed."""
        pieces = list(self._pieces())
        if self._held_now(pieces) != self._known:
            return None
        sized = zip(pieces, self._sizes, strict=True)
        return read(self._seed, ((key, values, size) for (key, values), size in sized if size))

    def _held_now(self, pieces: Iterable[tuple[PieceKey, torch.Tensor]]) -> Held:
        """Describe this rank's pieces to other ranks."""
        lines = [(self._order[stage, name], part, values.numel()) for (stage, name, part), values in pieces]
        places, parts, numels = zip(*lines, strict=True) if lines else ((), (), ())
        return places, parts, numels

    def _pieces(self) -> Iterator[tuple[PieceKey, torch.Tensor]]:
        """Iterate over this rank's pieces of its stages' units."""
        for stage in self._stages:
            for unit in self._units[stage]:
                for name in unit.names:
                    for piece in self._held(stage, name):
                        if piece.values.numel():
                            yield (stage, name, piece.part), piece.values


def metric_of(config: TimelyFreezeConfig, units: Units) -> Apf | AutoFreeze | None:
    """Return the metric of the settings, for a model of these units; None without one."""
    if config.stability_metric == "autofreeze":
        return AutoFreeze(layers_of(units), config.autofreeze_percentile)
    if config.stability_metric == "apf":
        return Apf(config.apf_threshold, periods=not config.plans)
    return None
