"""TimelyFreeze for torch.distributed.pipelining: one line before the first training step.

``tf_adapters.torch_pipelining.attach(schedule, config, optimizer=optimizer)`` with any schedule object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tf_adapters.hosts.lazy import exported

if TYPE_CHECKING:
    from tf_adapters.torch_pipelining.entry import attach

__all__ = ["attach"]
__getattr__ = exported("tf_adapters.torch_pipelining", dict.fromkeys(__all__, "entry"))
