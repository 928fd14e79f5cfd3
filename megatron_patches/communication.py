"""``megatron.core.pipeline_parallel.p2p_communication._batched_p2p_ops`` and ``_p2p_ops``: start sends and receives.

Why here: every schedule communicates through one of the two. They start the transfers and return the requests on which
the rank then waits. Work that runs before they return therefore overlaps the transfers. Not covered:
``use_ring_exchange_p2p``, which waits inside.

Versions: run on 0.16.1 and 0.19.2, the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch, handle_all

_COMMUNICATION = "megatron.core.pipeline_parallel.p2p_communication"
_ARGUMENTS = ("tensor_recv_prev", "tensor_recv_next")
PATCHES = (
    Patch(_COMMUNICATION, "_batched_p2p_ops", *_ARGUMENTS),
    Patch(_COMMUNICATION, "_p2p_ops", *_ARGUMENTS),
)


def apply(handler: Callable[..., Any]) -> None:
    """Let ``handler(run, tensor from the previous rank or None, tensor from the next or None)`` start transfers."""
    handle_all(dict.fromkeys(PATCHES, handler))
