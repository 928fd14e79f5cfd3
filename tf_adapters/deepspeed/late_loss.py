"""The loss that ``train_batch`` returns, sent without making the ranks of a pipeline meet.

The engine broadcasts the loss from the last stage at the end of each batch, and every rank waits for it. With
``LateLoss`` other ranks get a tensor at once, which waits when its value is read. All values are the host's.
Source: deepspeed/runtime/pipe/engine.py, ``_aggregate_total_loss``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from tf_adapters.hosts.late import LateValues
from tf_adapters.hosts.support import missing_name, module_of

_NAMES = ("_aggregate_total_loss", "_loss_stage_global_rank", "dp_group_loss", "is_pipe_parallel")


def loss_can_be_late(engine: Any) -> bool:
    """Return whether the engine sends its own loss and nothing more. It is the same on all ranks."""
    if missing_name(engine, _NAMES) or missing_name(engine.module, ("get_additional_losses",)):
        return False
    own = module_of(engine._aggregate_total_loss).split(".")[0] == "deepspeed"
    more = type(engine.module).get_additional_losses is not PipelineModule.get_additional_losses
    return bool(engine.is_pipe_parallel) and own and not more


def meetings(engine: Any, loss_is_late: bool) -> tuple[str, ...]:
    """Return what makes the pipeline's ranks meet between steps, as far as the engine's settings say."""
    outer = engine.optimizer
    has_norm = getattr(outer, "compute_grad_norm", True)
    found = {
        "the loss that train_batch sends to all ranks": not loss_is_late,
        f"gradient_clipping {engine.gradient_clipping():g}": has_norm and engine.gradient_clipping() > 0.0,
        "ZeRO's norm of all gradients": has_norm and engine.zero_optimization(),
        "BF16_Optimizer's norm of all gradients": has_norm
        and engine.bfloat16_enabled()
        and not engine.zero_optimization(),
        "ZeRO's check_grad_overflow": not has_norm and getattr(outer, "check_grad_overflow", False),
        "the overflow check of fp16": engine.fp16_enabled(),
        "tied weights": bool(engine.module.tied_comms),
    }
    return tuple(reason for reason, holds in found.items() if holds)


class LateLoss(LateValues):
    """Stands for one engine's ``_aggregate_total_loss``. Made on all ranks of the pipeline at the same point."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._host: Callable[[], torch.Tensor] = engine._aggregate_total_loss
        group = engine.grid.get_pipe_parallel_group()
        source = dist.get_group_rank(group, engine._loss_stage_global_rank())
        super().__init__(group, source, torch.device(engine.device))

    def aggregate(self) -> torch.Tensor:
        """Return the batch's mean loss over all replicas. The replicas' last stages still reduce it together."""
        engine = self._engine
        if not engine.is_last_stage():
            engine.dp_group_loss, late = self.receive(2)
            return late
        engine.is_pipe_parallel = False  # so that the host sends nothing
        try:
            loss = self._host()
        finally:
            engine.is_pipe_parallel = True
        self.send(torch.stack([engine.dp_group_loss, loss]).float())
        return loss
