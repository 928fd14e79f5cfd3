from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tf_adapters.testing import RankPool

GetPool = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def pools() -> Iterator[GetPool]:
    """Rank pools for DeepSpeed by size."""
    import deepspeed_ranks

    before = shared_buffers()
    yield from by_size(deepspeed_ranks.setup, deepspeed_ranks.teardown)
    for buffer in shared_buffers() - before:
        buffer.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def megatron() -> Iterator[GetPool]:
    """Rank pools for Megatron-Core by size."""
    import megatron_ranks

    yield from by_size(megatron_ranks.setup)


def by_size(setup: Callable[[], None], teardown: Callable[[], None] | None = None) -> Iterator[GetPool]:
    """Starts a pool when a test first asks for its size: importing a host takes longer than most tests."""
    started: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        return started.setdefault(size, RankPool(size, setup, teardown))

    yield get
    for pool in started.values():
        pool.close()


def shared_buffers() -> set[Path]:
    """Shared memory that DeepSpeed's CPU backend leaves behind, 69 MB for each rank."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
