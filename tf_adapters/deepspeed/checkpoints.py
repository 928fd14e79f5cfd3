"""The run's state in the engine's checkpoints."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tf_adapters.config import SECTION
from tf_adapters.hosts.adapter import HostAdapter

__all__ = ["loading", "saving"]


def saving(adapter: HostAdapter, save: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``engine.save_checkpoint`` with the run's state in the checkpoint's ``client_state``."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        adapter.settle()
        bound = signature.bind(*args, **kwargs)
        client_state = bound.arguments.get("client_state") or {}
        bound.arguments["client_state"] = {**client_state, SECTION: adapter.controller.state_dict()}
        return save(*bound.args, **bound.kwargs)

    return save_checkpoint


def loading(adapter: HostAdapter, load: Callable[..., Any], warmup_steps: Callable[[], int]) -> Callable[..., Any]:
    """Return ``engine.load_checkpoint``, which also resumes the run. ``warmup_steps`` are those after the load."""
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        adapter.settle()
        path, client_state = load(*args, **kwargs)
        weights_only = signature.bind(*args, **kwargs).arguments.get("load_module_only", False)
        if path is not None:
            state = (client_state or {}).pop(SECTION, None)
            adapter.controller.load_state_dict(None if weights_only else state, warmup_steps())
        return path, client_state

    return load_checkpoint
