"""Find the freezable units of a module and their work, by a host's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tf_adapters.selection.freeze_units import FreezeUnit

Own = Mapping[str, torch.nn.Parameter]
"""A module's own trainable parameters, by the module's names for them (not those of submodules)."""

_PAIRS = (("weight", "bias"), ("fc1_weight", "fc1_bias"), ("fc2_weight", "fc2_bias"))


def weights_with_biases(module: torch.nn.Module, own: Own) -> list[tuple[str, ...]]:
    """Group each weight with its bias, and all parameters of a grouped linear layer of Transformer Engine.

    Layers that compute no bias gradient for a frozen weight must be frozen in this way. A grouped layer checks only
    whether its first weight trains.
    Source: transformer_engine/pytorch/module/linear.py and grouped_linear.py; megatron/core/tensor_parallel/layers.py.
    """
    if hasattr(module, "num_gemms"):
        return [tuple(own)] if own else []
    pairs = [pair for pair in _PAIRS if all(name in own for name in pair)]
    paired = {name for pair in pairs for name in pair}
    return [*pairs, *((name,) for name in own if name not in paired)]


def _alone(module: torch.nn.Module, own: Own) -> list[tuple[str, ...]]:
    """Leave each parameter alone, except in layers of Transformer Engine."""
    of_engine = any(kind.__module__.startswith("transformer_engine.") for kind in type(module).__mro__)
    return weights_with_biases(module, own) if of_engine else [(name,) for name in own]


@dataclass(frozen=True)
class UnitRules:
    """The rules that differ between hosts.

    Attributes:
        groups: groups a module's own parameters that are frozen together; by default each alone, and a weight with its
            bias in layers of Transformer Engine.
        is_table: returns whether a module is an embedding: it gathers rows, and computes no matrix product.
        projects: returns whether a table, given by name and parameter, is also a factor of a product on the stage.
        token_share: returns the share of a rank's tokens that reach a module, given by name, in [0, 1].
    """

    groups: Callable[[torch.nn.Module, Own], Sequence[tuple[str, ...]]] = _alone
    is_table: Callable[[torch.nn.Module], bool] = lambda module: isinstance(module, torch.nn.Embedding)
    projects: Callable[[str, torch.nn.Parameter], bool] = lambda name, parameter: False
    token_share: Callable[[str], float] = lambda prefix: 1.0


def units_of(model: torch.nn.Module, rules: UnitRules | None = None) -> tuple[FreezeUnit, ...]:
    """Return the freezable units of a stage's module. Parameters that the user froze stay frozen and count as no work.

    A unit's work counts the elements that one token's weight gradient touches: a whole matrix, one row of a table.
    """
    rules = rules or UnitRules()
    names = dict(model.named_parameters())  # a shared parameter has one name
    multiplied = {
        id(p) for m in model.modules() if not rules.is_table(m) for p in m.parameters(recurse=False)
    }  # includes a table that is tied to an output layer of the stage
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
