"""``clip_grad_norm_``: gradients are clipped by their norm over all stages, whatever each rank has of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch_ranks import Case, Run, attached, batch, pool, whole

pytestmark = pytest.mark.distributed

MAX_NORM = 0.1
"""The gradients of all cases exceed it."""

DEFERRED = {"weight_gradients": "deferred"}
CASES = {
    "in place": Case(ratios=0.5),
    "deferred": Case(section=DEFERRED, ratios=0.0),
    "two stages on a rank": Case(schedule="ScheduleInterleaved1F1B", section=DEFERRED, ratios=0.5),
    "a stage without gradients": Case(section={"max_freeze_ratio": 1.0}, ratios={"0": 1.0}),
    "fsdp": Case(replicas="fsdp nested", section=DEFERRED, ratios=0.5),
    "tensor parallel": Case(replicas="tp", ratios=0.5),
}


def norm_of_whole_gradients(run: Run) -> float:
    """The norm over all stages, from each stage's unsharded gradients."""
    gradients = whole({name: p.grad for name, p in run.named.items() if p.grad is not None})
    square = sum((gradient.double().square().sum() for gradient in gradients.values()), torch.zeros(()).double())
    dist.all_reduce(square, group=run.stages[0].group)
    return float(square.sqrt())


def clipped(case: Case) -> list[tuple[float, float, float]]:
    """In each step, the norm before clipping, what the adapter returns, and the norm after clipping."""
    run = attached(case)
    found = []
    for step in range(case.steps):
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        run._run(run.schedule.step, batch(case, step, run.replica), [])
        before = norm_of_whole_gradients(run)
        parameters = (p for stage in run.stages for p in stage.submod.parameters())
        norm = run.adapter.clip_grad_norm_(parameters, MAX_NORM)
        found.append((before, float(norm), norm_of_whole_gradients(run)))
        for optimizer in run.optimizers:
            optimizer.step()
    run.adapter.detach()
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_clipped_by_their_norm_over_all_stages(name, tmp_path):
    case = replace(CASES[name], output_dir=str(tmp_path))
    for of_rank in pool(4 if case.replicas else 2).run(clipped, case):
        for before, norm, after in of_rank:
            assert before > MAX_NORM
            assert norm == pytest.approx(before, rel=1e-5)
            assert after == pytest.approx(MAX_NORM, rel=1e-3)
