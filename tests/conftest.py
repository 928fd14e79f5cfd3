from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tf_adapters.testing import RankPool

Setup = Callable[[], None]
GetPool = Callable[[int], RankPool]
KEPT = 4
"""Pools that stay alive at once. Starting one takes seconds; an idle rank takes memory only, about half a GB."""


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[[Setup, int], RankPool]]:
    """Rank pools by set-up and size, shared by all tests; of more than KEPT, the one used longest ago is closed."""
    started: dict[tuple[Setup, int], RankPool] = {}
    before = shared_buffers()

    def get(setup: Setup, size: int) -> RankPool:
        started[setup, size] = started.pop((setup, size), None) or RankPool(size, setup)
        for key in list(started)[:-KEPT]:
            started.pop(key).close()
        return started[setup, size]

    yield get
    for pool in started.values():
        pool.close()
    for buffer in shared_buffers() - before:
        buffer.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def pools(rank_pools: Callable[[Setup, int], RankPool]) -> GetPool:
    """Rank pools for DeepSpeed by size."""
    import deepspeed_ranks

    return functools.partial(rank_pools, deepspeed_ranks.setup)


@pytest.fixture(scope="session")
def megatron(rank_pools: Callable[[Setup, int], RankPool]) -> GetPool:
    """Rank pools for Megatron-Core by size."""
    import megatron_ranks

    return functools.partial(rank_pools, megatron_ranks.setup)


def shared_buffers() -> set[Path]:
    """Shared memory that DeepSpeed's CPU backend leaves behind, 69 MB for each rank."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
