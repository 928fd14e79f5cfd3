"""Whether a module has been given to torch.compile, which guards on requires_grad: one compilation for each mask."""

from __future__ import annotations

from collections.abc import Mapping

import torch

COMPILED = (
    "the model or a part of it is compiled with torch.compile, which would recompile for every mask; "
    'compile its layers one by one and take granularity "block", or train without compiling'
)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether this module itself (not a part of it) runs compiled."""
    return vars(module).get("_compiled_call_impl") is not None or type(module).__name__ == "OptimizedModule"


def any_compiled(modules: Mapping[str, torch.nn.Module]) -> bool:
    """Whether one of these or a part of it is compiled: a hook on it would compile it anew."""
    return any(is_compiled(part) for module in modules.values() for part in module.modules())
