"""Refuse unsupported hosts and models: the same one-line error on all ranks, before training starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import REFUSED, UnsupportedError
from tf_adapters.hosts.layers import layer_of
from tf_adapters.measuring.layer_times import Layers
from tf_adapters.weight_gradients.parameters import COMPILED, is_compiled

Problem = str | None
"""The reason why a host cannot be frozen, in one line; None if it can."""


def refuse(problem: Problem) -> None:
    """Raise UnsupportedError if there is a problem."""
    if problem:
        raise UnsupportedError(f"{REFUSED}{problem}")


def first_problem(checks: Mapping[str, object]) -> Problem:
    """Return the first text whose condition holds."""
    return next((text for text, holds in checks.items() if holds), None)


def module_of(function: Any) -> str:
    """Return the module that defines a function, without its wrappers; ``str(function)`` if it is not callable."""
    return str(getattr(inspect.unwrap(function), "__module__", "")) if callable(function) else str(function)


def foreign_module(function: Any, packages: Iterable[str]) -> str | None:
    """Return the module of a function, or of a wrapper around it, whose code is in none of ``packages``; else None.

    Unlike its ``__module__``, the globals of a wrapper are not those of the function that it wraps.
    """
    known = tuple(packages)
    while function is not None:
        plain = getattr(function, "__func__", function)
        module = str(getattr(plain, "__globals__", {}).get("__name__") or type(plain).__module__)
        if module.split(".")[0] not in known:
            return module
        function = getattr(plain, "__wrapped__", None)
    return None


def missing_name(owner: Any, names: Iterable[str], called: str = "") -> Problem:
    """Return a problem that names the first of a host's (private) names that ``owner`` does not have.

    The line names ``called``, by default the owner's class. Each host's guide lists the names.
    """
    for name in names:
        if not hasattr(owner, name):
            called = called or type(owner).__name__
            return f"this version of the host has no {called}.{name}; run `tf-adapters doctor` for those that work"
    return None


def compiled_problem(
    wrapped: torch.nn.Module,
    model: torch.nn.Module,
    layers: Layers,
    settings: TimelyFreezeConfig | None,
    has_taps: bool = False,
) -> Problem:
    """Return a problem if a compiled part of a stage (torch.compile) cannot be frozen as a whole.

    ``layers`` are those of ``model``, the stage's module inside the host's wrappers. Without settings, every compiled
    part is a problem. If the host's compiled layers can have taps, no part is one as long as nothing is masked.
    """
    if has_taps and settings is not None and not settings.masks_parameters:
        return None
    names = {id(part): name for name, part in model.named_modules()}
    compiled = [names.get(id(part), "") for part in wrapped.modules() if is_compiled(part)]
    if not compiled:
        return None
    if settings is None or not settings.freezes_blocks:
        return COMPILED
    if settings.splits_backwards:
        return (
            "layers are compiled with torch.compile, and compiled layers compute their weight gradients with the "
            f"backward; use {settings.without_split}"
        )
    outside = next((name for name in compiled if layer_of(name, layers) is None), None)
    if outside is None:
        return None
    return (
        f"{outside or 'a whole stage'} is compiled with torch.compile and holds layers that are frozen one by one; "
        "compile its layers instead"
    )
