"""``megatron.core.pipeline_parallel.schedules.forward_backward_*``: one batch through the pipeline.

Why here: only these functions know whether a batch trains or evaluates (``forward_only``), and its number of
microbatches. ``get_forward_backward_func`` looks them up in the module when it is called. Wrapping them therefore works
for scripts that have imported that function by name, as Megatron-LM's training loop does. Not covered: a loop that
called ``get_forward_backward_func`` before this patch and kept the result; ``tf_adapters.megatron`` then warns.

Versions: run on 0.16.1 and 0.19.2; read in 0.17.1 and 0.18.1, the same keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_patches.patch import Patch, handle_all

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


class Batch(NamedTuple):
    """The host's arguments of one batch. ``p2p_communicator`` and ``pg_collection`` may be None: the defaults."""

    model: Any
    data_iterator: Any
    num_microbatches: int
    forward_only: bool
    p2p_communicator: Any
    pg_collection: Any
    seq_length: int
    micro_batch_size: int


PATCHES = (
    Patch(_SCHEDULES, "forward_backward_no_pipelining", *Batch._fields),
    Patch(_SCHEDULES, "forward_backward_pipelining_without_interleaving", *Batch._fields),
    Patch(_SCHEDULES, "forward_backward_pipelining_with_interleaving", *Batch._fields),
)


def apply(handler: Callable[[Callable[[], Any], Batch], Any]) -> None:
    """Let ``handler(run, batch)`` run each batch."""
    handle_all(dict.fromkeys(PATCHES, lambda run, *arguments: handler(run, Batch(*arguments))))
