"""``megatron.core.pipeline_parallel.schedules.backward_step``: one microbatch's backward through one model chunk.

Why here: all three schedules run every backward through it. It is told neither the chunk nor the microbatch, only the
tensor that the forward returned, so the forward tags that tensor. What it does not cover:
``backward_step_multimodule`` (0.17 on), whose tensors come in dicts and take no tag.

Versions: run on 0.16.1 (with ``model_type``) and 0.19.2 (without); read in 0.17.1 and 0.18.1 (without).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch, argument

PATCH = Patch("megatron.core.pipeline_parallel.schedules", "backward_step", "output_tensor")

Handler = Callable[[Callable[[], Any], Any], Any]
"""Called with the host's backward (no arguments) and the forward's output; returns the host's result."""


def apply(handler: Handler) -> None:
    """Let ``handler`` run each backward."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        output = argument(original, "output_tensor")

        @functools.wraps(original)
        def backward_step(*args: Any, **kwargs: Any) -> Any:
            return handler(functools.partial(original, *args, **kwargs), output(args, kwargs))

        return backward_step

    PATCH.apply(wrapper)


revert = PATCH.revert
