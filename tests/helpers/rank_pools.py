"""Rank pools that all tests of a host share, and what their ranks let go of."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hosts import setup, teardown

from tf_adapters.testing import RankPool

GetPool = Callable[[int], RankPool]
PRELOAD = (  # most of what each rank would import for four seconds; torch imports the first with the first step
    *("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("numpy.random", "scipy.optimize", "einops", "setuptools", "transformers", "deepspeed.runtime.pipe.engine"),
    *("tf_adapters.torch_pipelining", "tf_adapters.deepspeed"),
)
os.environ["DS_ACCELERATOR"] = "cpu"  # before the process from which ranks are forked imports DeepSpeed
os.environ.setdefault("OMP_NUM_THREADS", "1")


def fork_ranks(
    size: int, setup: Callable[[], None] | None = None, teardown: Callable[[], None] | None = None
) -> RankPool:
    """``size`` ranks that start in less than a second."""
    return RankPool(size, setup, teardown, preload=PRELOAD)


@cache
def rank_pool(host: str, size: int) -> RankPool:
    """``size`` ranks that have imported one of ``HOSTS``; they end with pytest."""
    return fork_ranks(size, partial(prepare, host), partial(finish, host))


def prepare(host: str) -> None:
    setup(host)
    seed_everything()
    gc.collect()
    gc.freeze()  # what has been imported stays: every collection would go through it


def finish(host: str) -> None:
    teardown(host)
    seed_everything()  # what a test draws must not depend on the tests before it


def destroy_groups(destroy: Callable[[Any], None] = dist.destroy_process_group, kept: Collection[Any] = ()) -> None:
    """Destroy all of this rank's groups but the world and some: gloo's threads would go on polling for each of them."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and group not in kept:
            destroy(group)
    gc.collect()  # a group's threads end with the last object that holds it
    gc.freeze()  # what is left is there to stay: going through it took longer than many a test's run


def seed(value: int) -> None:
    """As ``torch.manual_seed``, which without a device formats the stack for each kind of one: 4 ms a call."""
    torch.default_generator.manual_seed(value)


def seed_everything() -> None:
    random.seed(0)
    np.random.seed(0)
    seed(0)
