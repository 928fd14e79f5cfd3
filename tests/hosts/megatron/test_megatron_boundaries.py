"""A rank that skips its update, with an optimizer of Megatron whose step needs no other rank: no rank waits for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_ranks import Case, build_chunks, build_optimizer, by_name, initialize, run_batch, values, zero_gradients

pytestmark = pytest.mark.distributed

EXACT: dict[str, Any] = {
    "max_freeze_ratio": 0.0,
    "weight_gradients": "deferred",
    "warmup_steps": 1,
    "monitoring_steps": 2,
    "progressive_steps": 1,
}
SKIPS = {0: (0, 4), 1: (1, 2, 5)}
"""By rank, the updates that it skips."""


def test_training_is_the_hosts_to_the_bit_whoever_skips_an_update(megatron: Any) -> None:
    case = Case(section=EXACT)
    alone = megatron(2).run(train_skipping, replace(case, section=None))
    for (mine, steps, failure), (theirs, *_) in zip(megatron(2).run(train_skipping, case), alone, strict=True):
        assert (steps, failure) == (6, None)
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def train_skipping(case: Case) -> tuple[dict[tuple[int, str], torch.Tensor], int, str | None]:
    import tf_adapters.megatron

    initialize(case)
    chunks = build_chunks(case)
    optimizer = build_optimizer(case, chunks).chained_optimizers[0]  # in fp32 and without clipping it sends nothing
    adapter = None
    if case.section is not None:
        adapter = tf_adapters.megatron.attach(chunks, optimizer, case.settings, num_microbatches=case.microbatches)
    for step in range(6):
        zero_gradients(chunks, optimizer)
        run_batch(case, chunks, step, range(case.microbatches))
        if step not in SKIPS[dist.get_rank()]:
            optimizer.step()
        dist.all_reduce(torch.ones(1))  # such as the mean loss: the host's ranks meet between two batches
    if adapter is None:
        return by_name(case, chunks, values), 0, None
    adapter.detach()
    return by_name(case, chunks, values), adapter.controller.state.completed_steps, adapter.controller.state.failure
