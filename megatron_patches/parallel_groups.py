"""``megatron.core.parallel_state.initialize_model_parallel``: makes all process groups.

Why here: it asks which ranks of a pipeline hold word and position embeddings. Not covered: loops that make their groups
in another way.

Versions: run on 0.16.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_patches.patch import Patch

PATCH = Patch("megatron.core.parallel_state", "initialize_model_parallel")
PATCHES = (PATCH,)


def apply(embedding_ranks: Callable[[Sequence[int]], list[int]]) -> None:
    """Let ``embedding_ranks(ranks of a pipeline)`` return those that hold embeddings."""

    def initialize(run: functools.partial[Any]) -> Any:
        return run(get_embedding_ranks=embedding_ranks, get_position_embedding_ranks=embedding_ranks)

    PATCH.handle(initialize)
