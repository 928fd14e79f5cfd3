"""Rank pools that tests share, and what their ranks let go of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from tf_adapters.testing import RankPool

GetPool = Callable[[int], RankPool]


def by_size(setup: Callable[[], None], teardown: Callable[[], None] | None = None) -> Iterator[GetPool]:
    """Starts a pool when a test first asks for its size: importing a host takes longer than most tests."""
    started: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        return started.setdefault(size, RankPool(size, setup, teardown))

    yield get
    for pool in started.values():
        pool.close()


def destroy_groups(destroy: Callable[[Any], None] = dist.destroy_process_group) -> None:
    """Destroy all of this rank's groups but the world: gloo's threads would go on polling for each of them."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            destroy(group)
