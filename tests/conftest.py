from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from rank_pools import GetPool, rank_pool

BUFFERS = pytest.StashKey[set[Path]]()


@pytest.fixture(scope="session")
def pools() -> GetPool:
    """DeepSpeed's ranks, by how many."""
    return partial(rank_pool, "deepspeed")


@pytest.fixture(scope="session")
def megatron() -> GetPool:
    """Megatron-Core's ranks, by how many."""
    return partial(rank_pool, "megatron")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BUFFERS] = shared_buffers()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """DeepSpeed's CPU backend leaves 69 MB of shared memory behind for each rank."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # there another worker's ranks may still use theirs
        for buffer in shared_buffers() - session.config.stash[BUFFERS]:
            buffer.unlink(missing_ok=True)


def shared_buffers() -> set[Path]:
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
