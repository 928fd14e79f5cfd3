from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pools import GetPool, by_size


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


def shared_buffers() -> set[Path]:
    """Shared memory that DeepSpeed's CPU backend leaves behind, 69 MB for each rank."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
