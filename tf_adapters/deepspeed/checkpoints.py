"""The run's state in the engine's checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tf_adapters.config import SECTION
from tf_adapters.hosts.adapter import HostAdapter


def keep_in_checkpoints(adapter: HostAdapter, engine: Any, warmup_steps: Callable[[], int]) -> None:
    """Save the run's state in each checkpoint's ``client_state``, and resume from it after a load.

    ``warmup_steps`` returns those after the load.
    """
    saved, loaded = inspect.signature(engine.save_checkpoint), inspect.signature(engine.load_checkpoint)

    def save(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = saved.bind(*args, **kwargs)
        client_state = bound.arguments.get("client_state") or {}
        bound.arguments["client_state"] = {**client_state, SECTION: adapter.controller.state_dict()}
        return run(*bound.args, **bound.kwargs)

    def load(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path, client_state = run(*args, **kwargs)
        weights_only = loaded.bind(*args, **kwargs).arguments.get("load_module_only", False)
        if path is not None:
            state = (client_state or {}).pop(SECTION, None)
            adapter.controller.load_state_dict(None if weights_only else state, warmup_steps())
        return path, client_state

    adapter.overrides.wrap(engine, "save_checkpoint", save)
    adapter.overrides.wrap(engine, "load_checkpoint", load)
