"""Whether a module has been given to torch.compile, which guards on requires_grad: one compilation for each mask."""

from __future__ import annotations

import torch

COMPILED = (
    "the model or a part of it is compiled with torch.compile, which would recompile for every mask; "
    "train without compiling"
)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether this module itself (not a part of it) runs compiled."""
    return vars(module).get("_compiled_call_impl") is not None or type(module).__name__ == "OptimizedModule"
