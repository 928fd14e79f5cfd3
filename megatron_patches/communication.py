"""``megatron.core.pipeline_parallel.p2p_communication._batched_p2p_ops`` and ``_p2p_ops``: sends and receives begin.

Why here: every schedule communicates through one of the two, which start the transfers and return what is waited for.
What is computed before they return is computed while the rank would wait. What it does not cover:
``use_ring_exchange_p2p``, which waits by itself.

Versions: run on 0.16.1 and 0.19.2, the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch, argument

_COMMUNICATION = "megatron.core.pipeline_parallel.p2p_communication"
_ARGUMENTS = ("tensor_recv_prev", "tensor_recv_next")
PATCHES = (
    Patch(_COMMUNICATION, "_batched_p2p_ops", *_ARGUMENTS),
    Patch(_COMMUNICATION, "_p2p_ops", *_ARGUMENTS),
)

Handler = Callable[[], None]
"""Called after a receive has begun and before anything waits for it."""


def apply(handler: Handler) -> None:
    """Let ``handler`` run while receives are under way."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        received = [argument(original, name) for name in _ARGUMENTS]

        @functools.wraps(original)
        def p2p_ops(*args: Any, **kwargs: Any) -> Any:
            requests = original(*args, **kwargs)
            if any(tensor(args, kwargs) is not None for tensor in received):
                handler()
            return requests

        return p2p_ops

    for patch in PATCHES:
        patch.check()
    for patch in PATCHES:
        patch.apply(wrapper)


def revert() -> None:
    for patch in PATCHES:
        patch.revert()
