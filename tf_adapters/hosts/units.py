"""What of a module can be frozen on its own, and how much work that spares: one function, with a host's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tf_adapters.selection.units import FreezeUnit

__all__ = ["UnitRules", "units_of"]

Own = Mapping[str, torch.nn.Parameter]
"""A module's own trainable parameters, by the module's names for them."""


@dataclass(frozen=True)
class UnitRules:
    """What differs between hosts.

    Attributes:
        groups: which of a module's own parameters are frozen together; by default each alone.
        is_table: whether a module looks rows of its weight up and multiplies by none of it.
        projects: whether a table, by its name and parameter, is also multiplied by somewhere on the stage.
        token_share: the share of a rank's tokens that reach a module, by its name, in [0, 1].
    """

    groups: Callable[[torch.nn.Module, Own], Sequence[tuple[str, ...]]] = lambda module, own: [(n,) for n in own]
    is_table: Callable[[torch.nn.Module], bool] = lambda module: isinstance(module, torch.nn.Embedding)
    projects: Callable[[str, torch.nn.Parameter], bool] = lambda name, parameter: False
    token_share: Callable[[str], float] = lambda prefix: 1.0


def units_of(model: torch.nn.Module, rules: UnitRules | None = None) -> tuple[FreezeUnit, ...]:
    """The freezable units of a stage's module. What the user froze stays frozen and counts as no work.

    Work is in elements that a token's weight gradient touches: all of a matrix, one row of an embedding table.
    """
    rules = rules or UnitRules()
    names = dict(model.named_parameters())  # a parameter that two modules share has one name
    multiplied = {
        id(p) for m in model.modules() if not rules.is_table(m) for p in m.parameters(recurse=False)
    }  # a table tied to an output layer of the same stage is among them
    units = []
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        own = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and parameter.numel() and dot + name in names
        }
        for group in rules.groups(module, own):
            work = 0.0
            for name in group:
                parameter, full = own[name], dot + name
                looks_up = rules.is_table(module) and id(parameter) not in multiplied
                one_row = looks_up and not rules.projects(full, parameter)
                work += parameter.shape[-1] if one_row else parameter.numel()
            shape = tuple(own[group[0]].shape)
            units.append(FreezeUnit(tuple(dot + name for name in group), work * rules.token_share(prefix), shape))
    return tuple(units)
