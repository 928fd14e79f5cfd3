"""Rank pools that all tests of a host share, and what their ranks let go of."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from hosts import setup, teardown

from tf_adapters.testing import RankPool

GetPool = Callable[[int], RankPool]


@cache
def rank_pool(host: str, size: int) -> RankPool:
    """``size`` ranks that have imported one of ``HOSTS``, which takes longer than most tests; they end with pytest."""
    return RankPool(size, partial(setup, host), partial(teardown, host))


def destroy_groups(destroy: Callable[[Any], None] = dist.destroy_process_group) -> None:
    """Destroy all of this rank's groups but the world: gloo's threads would go on polling for each of them."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            destroy(group)
    gc.collect()  # a group's threads end with the last object that holds it
    gc.freeze()  # what is left is there to stay: going through it took longer than many a test's run
