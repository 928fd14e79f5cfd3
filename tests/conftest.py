from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hypothesis
import pytest
from rank_pools import GetPool, rank_pool
from two_nodes import Node, TwoNodes, why_not

# What these assert is shown as in a test module.
pytest.register_assert_rewrite("deepspeed_oracle", "megatron_oracle", "torch_oracle", "disturbed_runs", "jobs")
# Every run draws the same examples, on every machine. `make fuzz` draws others and prints the seed.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("exploring", derandomize=False, deadline=None, max_examples=1_000)
hypothesis.settings.load_profile("repeatable")
BUFFERS = pytest.StashKey[set[Path]]()


@pytest.fixture(scope="session")
def pools() -> GetPool:
    """DeepSpeed's ranks, by how many."""
    return partial(rank_pool, "deepspeed")


@pytest.fixture(scope="session")
def megatron() -> GetPool:
    """Megatron-Core's ranks, by how many."""
    return partial(rank_pool, "megatron")


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    if reason := why_not():
        pytest.skip(f"two nodes: {reason}")
    with TwoNodes() as two:
        yield two


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BUFFERS] = shared_buffers()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """DeepSpeed's CPU backend leaves 69 MB of shared memory behind for each rank."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # there another worker's ranks may still use theirs
        for buffer in shared_buffers() - session.config.stash[BUFFERS]:
            buffer.unlink(missing_ok=True)


def shared_buffers() -> set[Path]:
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
