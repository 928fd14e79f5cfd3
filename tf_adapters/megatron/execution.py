"""Compute deferred weight gradients in Megatron's schedules before gradients are reduced.

Source: megatron/core/pipeline_parallel/schedules.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tf_adapters.overrides import Overrides


@contextmanager
def before_reduction(config: Any, finish: Callable[[int | None], None]) -> Iterator[None]:
    """Run a batch inside. ``finish`` is called before the host reduces the gradients of a chunk, or of all (None)."""

    def first(run: Callable[..., Any], *args: Any, chunk: int | None = None, **kwargs: Any) -> Any:
        finish(chunk)
        return run(*args, **kwargs)

    sync = config.grad_sync_func
    with Overrides() as overrides:
        if isinstance(sync, (list, tuple)):
            of_chunks = [functools.partial(first, function, chunk=chunk) for chunk, function in enumerate(sync)]
            overrides.set(config, "grad_sync_func", of_chunks)
        elif sync is not None:
            overrides.set(config, "grad_sync_func", functools.partial(first, sync))
        if config.finalize_model_grads_func is not None:
            overrides.set(
                config, "finalize_model_grads_func", functools.partial(first, config.finalize_model_grads_func)
            )
        yield
