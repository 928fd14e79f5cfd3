"""The study's unbiased gradients, on a real pipeline of one stage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from rank_pools import fork_ranks

BENCHMARKS = str(Path(__file__).resolve().parents[1] / "benchmarks")
pytestmark = [pytest.mark.distributed, pytest.mark.own_ranks]
MICROBATCHES, STEPS = 4, 200


def test_the_mean_gradient_is_the_whole_one() -> None:
    """And half of it without the scale: every parameter is frozen in half of the microbatches."""
    with fork_ranks(2) as ranks:
        scaled, plain = (ranks.run(mean_share, inverse, timeout_s=120) for inverse in (True, False))
    assert scaled == pytest.approx([1.0, 1.0], abs=0.08)
    assert plain == pytest.approx([0.5, 0.5], abs=0.04)


def mean_share(inverse: bool) -> float:
    """Of the gradients of an unmasked step, what the mean of many masked ones on the same batch has."""
    sys.path.insert(0, BENCHMARKS)
    import torch.distributed as dist
    from accuracy_scaling import InverseScale
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from tf_adapters.testing import force_plan
    from tf_adapters.torch_pipelining import attach

    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(2 * MICROBATCHES, 8, generator=torch.Generator().manual_seed(5))

    def gradients() -> torch.Tensor:
        optimizer.zero_grad()
        schedule.step(*((batch,) if rank == 0 else ()), **({} if rank == 0 else {"target": batch.flip(0)}))
        optimizer.step()
        held = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
        return torch.cat([gradient.flatten() for gradient in held])

    whole = gradients()
    adapter = attach(schedule, {"warmup_steps": 0, "monitoring_steps": 2}, optimizer=optimizer)
    assert adapter is not None
    force_plan(adapter.controller, 0.5)
    if inverse:
        InverseScale(stage, module.parameters(), adapter)
    mean = torch.stack([gradients() for _ in range(STEPS)]).mean(dim=0)
    adapter.detach()
    return float(mean @ whole / (whole @ whole))
