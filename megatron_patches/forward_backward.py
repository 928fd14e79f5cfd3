"""``megatron.core.pipeline_parallel.schedules.forward_backward_*``: one batch through the pipeline.

Why here: only these functions know whether a batch trains or evaluates (``forward_only``), and how many microbatches
it has. ``get_forward_backward_func`` looks them up in the module when it is called, so wrapping them works for
scripts that have imported that function by name, as Megatron-LM's training loop does. What it does not cover: a loop
that called ``get_forward_backward_func`` before this patch and kept the result; ``tf_adapters.megatron`` warns then.

Versions: run on 0.16.1 and 0.19.2; read in 0.17.1 and 0.18.1, the same keyword arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch, argument

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_ARGUMENTS = ("model", "num_microbatches", "forward_only")
PATCHES = (
    Patch(_SCHEDULES, "forward_backward_no_pipelining", *_ARGUMENTS),
    Patch(_SCHEDULES, "forward_backward_pipelining_without_interleaving", *_ARGUMENTS),
    Patch(_SCHEDULES, "forward_backward_pipelining_with_interleaving", *_ARGUMENTS),
)

Handler = Callable[[Callable[[], Any], Any, int, bool], Any]
"""Called with the host's schedule (no arguments), the model, the number of microbatches and ``forward_only``."""


def apply(handler: Handler) -> None:
    """Let ``handler`` run each batch."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        model, microbatches = argument(original, "model"), argument(original, "num_microbatches")
        forward_only = argument(original, "forward_only")

        @functools.wraps(original)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(original, *args, **kwargs)
            return handler(run, model(args, kwargs), microbatches(args, kwargs), bool(forward_only(args, kwargs)))

        return forward_backward

    for patch in PATCHES:
        patch.check()
    for patch in PATCHES:
        patch.apply(wrapper)


def revert() -> None:
    for patch in PATCHES:
        patch.revert()
