"""What a mask is made of: the smallest sets of parameters that a host can freeze on their own."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tf_adapters.errors import ConfigError

Tie = tuple[tuple[int, str], ...]
"""(stage, name) of each place where one weight is held: several stages that reduce its gradient together."""
NO_ROWS: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class FreezeUnit:
    """Parameters that are frozen together: usually one tensor, where a host needs it a weight with its bias.

    ``work`` is the unit's weight-gradient work in arbitrary but common units (elements: a weight gradient
    costs as many multiply-adds per token as the tensor has elements). ``shape`` is the stratum it is drawn in.
    ``rows`` says how many output rows of equal work can be frozen apart; 0: the unit is frozen whole or not at all.
    """

    names: tuple[str, ...]
    work: float
    shape: tuple[int, ...]
    rows: int = 0


def total_work(units: Iterable[FreezeUnit]) -> float:
    return sum(unit.work for unit in units)


def frozen_share(units: Sequence[FreezeUnit], frozen: frozenset[int], rows: Mapping[int, int] = NO_ROWS) -> float:
    """Share of the stage's weight-gradient work that the units at ``frozen`` hold, in [0, 1].

    ``rows`` adds so many rows of the units at these indices, which are not among ``frozen``.
    """
    total = total_work(units)
    work = sum(units[index].work for index in frozen)
    work += sum(units[index].work * count / units[index].rows for index, count in rows.items())
    return work / total if total else 0.0


def without(units: Mapping[int, Sequence[FreezeUnit]], patterns: Sequence[str]) -> dict[int, tuple[FreezeUnit, ...]]:
    """The units none of whose names any pattern (of ``fnmatch``) matches.

    Raises ConfigError for a pattern that matches nothing: it would be a typing error that nobody sees.
    """
    names = [name for of_stage in units.values() for unit in of_stage for name in unit.names]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f'timely_freeze.freeze_exclude: "{pattern}" matches no parameter such as "{names[0]}"')
    return {
        stage: tuple(u for u in of_stage if not any(fnmatch.filter(u.names, pattern) for pattern in patterns))
        for stage, of_stage in units.items()
    }


def same_names(units: Mapping[int, Iterable[FreezeUnit]]) -> tuple[Tie, ...]:
    """The ties of a host that gives a tied weight the same name on every stage that holds it."""
    stages: dict[str, list[int]] = {}
    for stage in sorted(units):
        for unit in units[stage]:
            for name in unit.names:
                stages.setdefault(name, []).append(stage)
    return tuple(tuple((stage, name) for stage in held) for name, held in stages.items() if len(held) > 1)
