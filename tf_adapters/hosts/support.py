"""What every host's refusals share: one line, on all ranks, before any training starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tf_adapters.errors import UnsupportedError
from tf_adapters.masking.compiled import COMPILED, is_compiled

__all__ = ["Problem", "compiled_problem", "first_problem", "missing_name", "refuse"]

Problem = str | None
"""Why a host cannot be frozen, in one line; None where it can."""


def refuse(problem: Problem) -> None:
    """Raise UnsupportedError if there is a problem."""
    if problem:
        raise UnsupportedError(f"timely_freeze cannot run here: {problem}")


def first_problem(checks: Mapping[str, object]) -> Problem:
    """Return the first text whose condition holds."""
    return next((text for text, holds in checks.items() if holds), None)


def missing_name(owner: Any, names: Iterable[str], called: str = "") -> Problem:
    """Return a problem that names the first of a host's (private) names that ``owner`` does not have.

    ``called`` is the owner in that line; by default its class. Each host's guide lists the names.
    """
    for name in names:
        if not hasattr(owner, name):
            called = called or type(owner).__name__
            return f"this version of the host has no {called}.{name}; run `tf-adapters doctor` for those that work"
    return None


def compiled_problem(module: torch.nn.Module) -> Problem:
    """Return a problem if the module or a part of it is compiled with torch.compile."""
    return COMPILED if any(map(is_compiled, module.modules())) else None
