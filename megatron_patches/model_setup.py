"""``megatron.training.training.setup_model_and_optimizer``: model, optimizer and checkpoint of a Megatron-LM script.

Why here: it is the last function before training that has all three, and ``pretrain``, in the same module, looks it up
when it is called. Not covered: loops that build their model in another way, which can call
``tf_adapters.megatron.attach``.

Versions: run on Megatron-LM 0.16.1; read in 0.19.0 and main: other arguments, the same three results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch

PATCH = Patch("megatron.training.training", "setup_model_and_optimizer")
PATCHES = (PATCH,)


def apply(after: Callable[[Any, Any, Any], None]) -> None:
    """Call ``after(model chunks, optimizer, learning-rate scheduler)`` when they are ready to train."""

    def set_up(run: Callable[[], Any]) -> Any:
        result = run()
        after(*result[:3])
        return result

    PATCH.handle(set_up)
