"""``megatron.core.pipeline_parallel.schedules.forward_backward_*``: one batch through the pipeline.

Why here: only these functions know whether a batch trains or evaluates (``forward_only``), and its number of
microbatches. ``get_forward_backward_func`` looks them up in the module when it is called. Wrapping them therefore works
for scripts that have imported that function by name, as Megatron-LM's training loop does. Not covered: a loop that
called ``get_forward_backward_func`` before this patch and kept the result; ``tf_adapters.megatron`` then warns.

Versions: run on 0.16.1 and 0.19.2; read in 0.17.1 and 0.18.1, the same keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch, handle_all

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_ARGUMENTS = ("model", "data_iterator", "num_microbatches", "forward_only", "p2p_communicator")
PATCHES = (
    Patch(_SCHEDULES, "forward_backward_no_pipelining", *_ARGUMENTS),
    Patch(_SCHEDULES, "forward_backward_pipelining_without_interleaving", *_ARGUMENTS),
    Patch(_SCHEDULES, "forward_backward_pipelining_with_interleaving", *_ARGUMENTS),
)


def apply(handler: Callable[..., Any]) -> None:
    """Let ``handler`` run each batch.

    Its arguments are ``run``, the model, its data iterators, the number of microbatches, ``forward_only``, and a
    P2PCommunicator or None.
    """
    handle_all(dict.fromkeys(PATCHES, handler))
