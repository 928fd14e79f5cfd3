"""``megatron.training.arguments.validate_args``: derives and checks a script's arguments.

Why here: it turns ``--pipeline-model-parallel-layout`` into the number of virtual stages, before anything is built.
It is imported by name.

Versions: run on Megatron-LM 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch

PATCH = Patch("megatron.training.arguments", "validate_args", "args", everywhere=True)
PATCHES = (PATCH,)


def apply(before: Callable[[Any], None]) -> None:
    """Call ``before(args)`` before Megatron validates them."""

    def validate(run: Callable[[], Any], args: Any) -> Any:
        before(args)
        return run()

    PATCH.handle(validate)
