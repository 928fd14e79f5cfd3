"""DeepSpeed training in which every step has another random order, and transfers begin late."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from deepspeed_oracle import BF16, ZERO1
from deepspeed_ranks import Case, batch, build_engine, parameters_of
from random_orders import late, random_order

from tf_adapters.schedule.deferral import keeps_order
from tf_adapters.testing import force_order

ONE_STAGE = {"goal": "exact", "max_freeze_ratio": 0.0}
EXACT = {**ONE_STAGE, "placement": "v"}
ON_FOUR = {"gradient_accumulation_steps": 8}
SAME_BITS = {
    "four ranks, one stage each": Case(stages=4, section=ONE_STAGE, config=ON_FOUR, steps=7),
    "two ranks": Case(dualpipev=True, section=EXACT, steps=7),
    "two ranks, zero1": Case(dualpipev=True, section=EXACT, config=ZERO1, steps=7),
    "four ranks": Case(stages=4, dualpipev=True, section=EXACT, config=ON_FOUR, steps=7),
    "four ranks, zero1, bf16": Case(
        stages=4, dualpipev=True, section=EXACT, config={**ON_FOUR, **BF16, **ZERO1}, steps=7
    ),
}


def in_random_orders(case: Case) -> dict[str, Any]:
    """Train, every step in another order, with transfers that begin late and an evaluation in between."""
    import tf_adapters.deepspeed
    from tf_adapters.hosts.links import Links

    losses: list[float] = []
    moved: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "send", late(Links.send, dist.get_rank()))
        patch.setattr(Links, "receive", late(Links.receive, 100 + dist.get_rank()))
        engine = build_engine(case)
        adapter = tf_adapters.deepspeed.attach(engine) if case.section is not None else None
        for step in range(case.steps):
            if adapter is not None and step > 0:
                schedule = adapter.controller.schedule
                order = random_order(schedule, seed=step)
                force_order(adapter.controller, order)
            losses.append(float(engine.train_batch(iter(batch(step, 0, case.microbatches)))))
            if adapter is not None and step > 0:  # a control step runs the host's order
                moved.append(adapter.controller.execution == order and not keeps_order(schedule, order))
            if step == 2:
                losses.append(float(engine.eval_batch(iter(batch(99, 0, case.microbatches)))))
            if step == 3 and adapter is not None:  # which the host alone cannot do
                engine.eval_batch(iter(batch(99, 0, case.microbatches + 2)), num_micro_batches=case.microbatches + 2)
            if step == 4:
                engine.reset_activation_shape()
            if adapter is not None and step == case.steps - 2:
                assert adapter.controller.state.failure is None
                adapter.detach()
                adapter = None
    return {"losses": losses, "moved": moved, "parameters": parameters_of(engine)}
