"""Forward-time masking: a frozen parameter's weight gradient is never recorded, so it is never computed.

While a microbatch's forward runs, and again while its backward runs, its frozen parameters have
``requires_grad=False``. Autograd then builds no weight-gradient node for them and saves no activation for it.
Turning the flag off for the backward alone would skip nothing; turning it off for the forward alone would lose
gradients under recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

COMPILED = (
    "the model or a part of it is compiled with torch.compile, which would recompile for every mask; "
    'compile its layers one by one and take granularity "block", or train without compiling'
)


class ParameterMask:
    """Freezes parameters of one stage by name."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)

    def frozen(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Freeze ``names`` inside the block. Parameters that the user has frozen stay so after it."""
        return without_gradients([p for p in map(self._parameters.__getitem__, names) if p.requires_grad])


@contextmanager
def without_gradients(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Set ``requires_grad=False`` for some parameters inside the block, and True after it, also after an error."""
    for parameter in parameters:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad = True


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether torch.compile has compiled this module itself, not a part of it."""
    return vars(module).get("_compiled_call_impl") is not None or compiled_module(module) is not None


def compiled_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that ``torch.compile(module)`` has wrapped; None if this is no such wrapper.

    FSDP makes a subclass of the wrapper's class.
    """
    wraps = any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__)
    return module._modules.get("_orig_mod") if wraps else None


def any_compiled(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether one of these or a part of it is compiled. A hook on it would compile it again."""
    return any(is_compiled(part) for module in modules for part in module.modules())
