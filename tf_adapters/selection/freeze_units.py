"""Freeze units: the smallest sets of parameters that a host can freeze separately."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tf_adapters.errors import ConfigError
from tf_adapters.measuring.estimates import grouped

Tie = tuple[tuple[int, str], ...]
"""(stage, name) of every copy of one tied weight. The stages that hold it reduce its gradient together."""


@dataclass(frozen=True, slots=True)
class FreezeUnit:
    """Parameters that are frozen together: usually one tensor; a weight with its bias if the host needs that.

    ``work`` is the work of the unit's weight gradient, in elements: it takes as many multiply-adds per token as the
    tensor has elements. Units of equal work and ``shape`` are interchangeable in a draw. ``cap``, in [0, 1], is the
    probability that the unit is frozen at a freeze ratio of 1; at a ratio r the probability is r times ``cap``.
    """

    names: tuple[str, ...]
    work: float
    shape: tuple[int, ...]
    cap: float = 1.0


def joined(units: Sequence[FreezeUnit]) -> FreezeUnit:
    """Join units into one, with the smallest of their caps."""
    names = tuple(name for unit in units for name in unit.names)
    work, cap = sum(unit.work for unit in units), min(unit.cap for unit in units)
    return FreezeUnit(names, work, units[0].shape, cap)


def freezable_work(units: Iterable[FreezeUnit]) -> float:
    """Expected frozen work of the units at a freeze ratio of 1. Freeze ratios are shares of it."""
    return sum(unit.work * unit.cap for unit in units)


def frozen_share(units: Sequence[FreezeUnit], frozen: frozenset[int]) -> float:
    """Return the work of the units at indices ``frozen``, as a share of the stage's freezable work.

    Its mean over draws is the requested ratio. One draw may exceed 1 if units have caps below 1.
    """
    total = freezable_work(units)
    work = sum(units[index].work for index in frozen)
    return work / total if total else 0.0


def limited(
    units: Mapping[int, Sequence[FreezeUnit]], exclude: Sequence[str], caps: Mapping[str, float]
) -> dict[int, tuple[FreezeUnit, ...]]:
    """Return the units that can be frozen, each with the smallest cap of the ``fnmatch`` patterns that match its names.

    A cap of 0, which is the meaning of ``exclude``, removes the unit. Raises ConfigError for a pattern that matches
    nothing, since it is probably a typing error.
    """
    names = [name for of_stage in units.values() for unit in of_stage for name in unit.names]
    _must_match("freeze_exclude", exclude, names)
    _must_match("freeze_limits", caps, names)
    chosen = {**caps, **dict.fromkeys(exclude, 0.0)}

    def smallest_cap(unit: FreezeUnit) -> float:
        return min((unit.cap, *(cap for pattern, cap in chosen.items() if fnmatch.filter(unit.names, pattern))))

    return {
        stage: tuple(replace(unit, cap=cap) for unit in of_stage if (cap := smallest_cap(unit)) > 0.0)
        for stage, of_stage in units.items()
    }


def _must_match(field: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            example = f'such as "{names[0]}"' if names else "since nothing trains"
            raise ConfigError(f'timely_freeze.{field}: "{pattern}" matches no trainable parameter {example}')


def same_names(units: Mapping[int, Iterable[FreezeUnit]]) -> tuple[Tie, ...]:
    """Return the tied weights of a host that gives a weight the same name on every stage that holds it."""
    stages = grouped((name, stage) for stage in sorted(units) for unit in units[stage] for name in unit.names)
    return tuple(tuple((stage, name) for stage in held) for name, held in stages.items() if len(held) > 1)
