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
    yield from one_at_a_time(deepspeed_ranks.setup, deepspeed_ranks.teardown)
    for buffer in shared_buffers() - before:
        buffer.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def megatron() -> Iterator[GetPool]:
    """Rank pools for Megatron-Core by size."""
    import megatron_ranks

    yield from one_at_a_time(megatron_ranks.setup)


def one_at_a_time(setup: Callable[[], None], teardown: Callable[[], None] | None = None) -> Iterator[GetPool]:
    """Starts a pool when a test asks for its size, and ends the one before: there are two cores."""
    started: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in started:
            close()
            started[size] = RankPool(size, setup, teardown)
        return started[size]

    def close() -> None:
        for pool in started.values():
            pool.close()
        started.clear()

    yield get
    close()


def shared_buffers() -> set[Path]:
    """Shared memory that DeepSpeed's CPU backend leaves behind, 69 MB for each rank."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
