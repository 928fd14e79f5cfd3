"""``megatron.core.pipeline_parallel.schedules.forward_step``: one microbatch's forward through one model chunk.

Why here: all three of Megatron's schedules run every forward through this one function, looked up in the module when
it is called, and it is told which microbatch it runs. What it does not cover: the combined 1F1B schedule
(``overlap_moe_expert_parallel_comm``) and hybrid context parallelism have forwards of their own; both are refused.

Versions: run on 0.16.1 and 0.19.2; read in 0.17.1 and 0.18.1, the same signature by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch, argument

PATCH = Patch("megatron.core.pipeline_parallel.schedules", "forward_step", "model", "current_microbatch")

Handler = Callable[[Callable[[], Any], Any, int | None], Any]
"""Called with the host's forward (no arguments), the model chunk and the microbatch; returns the host's result."""


def apply(handler: Handler) -> None:
    """Let ``handler`` run each forward."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        model, microbatch = argument(original, "model"), argument(original, "current_microbatch")

        @functools.wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(original, *args, **kwargs)
            return handler(run, model(args, kwargs), microbatch(args, kwargs))

        return forward_step

    PATCH.apply(wrapper)


revert = PATCH.revert
