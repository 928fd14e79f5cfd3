"""TimelyFreeze for torch.distributed.pipelining: one line before the first training step.

``tf_adapters.torch_pipelining.attach(schedule, config, optimizer=optimizer)`` with any schedule object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_adapters.torch_pipelining.entry import attach

__all__ = ["attach"]


def __getattr__(name: str) -> Any:
    """Import the host when it is needed: that takes seconds."""
    if name in __all__:
        from tf_adapters.torch_pipelining import entry

        return getattr(entry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
