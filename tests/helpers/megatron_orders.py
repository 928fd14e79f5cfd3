"""Megatron training in which every step has another random order, and transfers begin late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from megatron_oracle import OVERLAP
from megatron_ranks import Case, by_name, start, train_step, values
from random_orders import late, random_order

from tf_adapters.schedule.deferral import keeps_order
from tf_adapters.testing import force_order

EXACT = {"goal": "exact", "max_freeze_ratio": 0.0, "warmup_steps": 1, "monitoring_steps": 2, "on_error": "raise"}
INTERLEAVED = Case(pp=4, vp=2, layers=8, microbatches=8, steps=8, section=EXACT)
CASES = {
    "pipeline 4": Case(pp=4, microbatches=6, steps=8, section=EXACT),
    "pipeline 4, interleaved": INTERLEAVED,
    "overlapped transfers": replace(INTERLEAVED, model={"overlap_p2p_comm": True, "batch_p2p_comm": False}),
    "replicas 2, overlap": Case(vp=2, steps=8, ddp=OVERLAP, section=EXACT),
    "replicas 2, aligned reduce": Case(vp=2, steps=8, ddp=OVERLAP, align=True, section=EXACT),
    "V of 8": Case(pp=4, vp=2, v=True, layers=9, microbatches=8, steps=8, section=EXACT),
    "V, replicas 2, overlap, tied": Case(vp=2, v=True, tied=True, steps=8, ddp=OVERLAP, section=EXACT),
    "tied, tensor 2": Case(vp=2, tp=2, tied=True, steps=8, section=EXACT),
}


def in_random_orders(case: Case) -> dict[str, Any]:
    """Train, every step in another order, with transfers that begin late."""
    from tf_adapters.hosts.links import Links

    outcome: dict[str, Any] = {"steps": [], "moved": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "send", late(Links.send, dist.get_rank()))
        patch.setattr(Links, "receive", late(Links.receive, 100 + dist.get_rank()))
        chunks, optimizer, adapter = start(case)
        for step in range(case.steps):
            if adapter is not None and step > 0:
                schedule = adapter.controller.schedule
                order = random_order(schedule, seed=step)
                force_order(adapter.controller, order)
            losses = train_step(case, chunks, optimizer, step)
            outcome["steps"].append({"losses": losses, "after": by_name(case, chunks, values)})
            if adapter is not None and step > 0:  # a control step runs the host's order
                ran = adapter.controller.execution
                outcome["moved"].append(ran == order and not keeps_order(schedule, order))
    if adapter is not None:
        assert adapter.controller.state.failure is None
        adapter.detach()
    return outcome
