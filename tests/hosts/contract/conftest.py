"""Each host in turn, and its ranks, for the contract tests."""

from __future__ import annotations

import functools

import pytest
from hosts import HOSTS
from rank_pools import GetPool, rank_pool


@pytest.fixture(scope="module", params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(host: str) -> GetPool:
    """The host's ranks, by how many; its other schedules run on the same ones."""
    return functools.partial(rank_pool, host.split()[0])
