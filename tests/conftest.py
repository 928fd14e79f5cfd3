from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from rank_pools import GetPool, rank_pool


@pytest.fixture(scope="session")
def pools() -> GetPool:
    """DeepSpeed's ranks, by how many."""
    return partial(rank_pool, "deepspeed")


@pytest.fixture(scope="session")
def megatron() -> GetPool:
    """Megatron-Core's ranks, by how many."""
    return partial(rank_pool, "megatron")


@pytest.fixture(scope="session", autouse=True)
def no_shared_buffers_left() -> Iterator[None]:
    """DeepSpeed's CPU backend leaves 69 MB of shared memory behind for each rank."""
    before = shared_buffers()
    yield
    if "PYTEST_XDIST_WORKER" not in os.environ:  # there another worker's ranks may still use theirs
        for buffer in shared_buffers() - before:
            buffer.unlink(missing_ok=True)


def shared_buffers() -> set[Path]:
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
