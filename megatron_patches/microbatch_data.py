"""``megatron.training.utils.get_batch_on_this_tp_rank``: hands a microbatch to the ranks of a tensor-parallel group.

Why here: on the first stage it hands over the tokens, on the last one the labels, and on a rank that has both stages
only the tokens. Asked for multi-token prediction it hands over everything. Scripts import it by name.

Versions: run on Megatron-LM 0.16.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch

PATCH = Patch("megatron.training.utils", "get_batch_on_this_tp_rank", "data_iterator", everywhere=True)
PATCHES = (PATCH,)


def apply(needs_all: Callable[[], bool]) -> None:
    """Let a rank hand over everything if ``needs_all()``."""

    def get_batch(run: functools.partial[Any], data_iterator: Any) -> Any:
        return run.func(data_iterator, mtp_on_this_rank=True) if needs_all() else run()

    PATCH.handle(get_batch)
