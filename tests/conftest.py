from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from rank_pools import GetPool, rank_pool, seed_everything
from two_nodes import Node, TwoNodes, why_not

from tf_adapters.weight_gradients import interception

# What these assert is shown as in a test module.
pytest.register_assert_rewrite(
    "deepspeed_oracle", "megatron_oracle", "torch_oracle", "disturbed_runs", "hostile", "jobs", "user_layers"
)
BUFFERS = pytest.StashKey[set[Path]]()

# The same examples in every run, and no wall-clock limits. `make fuzz` draws new ones, from the seed that it prints.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def pools() -> GetPool:
    """DeepSpeed's ranks, by how many."""
    return partial(rank_pool, "deepspeed")


@pytest.fixture(scope="session")
def megatron() -> GetPool:
    """Megatron-Core's ranks, by how many."""
    return partial(rank_pool, "megatron")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    seed_everything()


@pytest.fixture(autouse=True)
def _own_methods() -> Iterator[None]:
    """Give classes their own methods back when a test leaves taps in place: the next test may look at them."""
    yield
    for left in list(interception._interceptions.values()):
        left.remove()


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
