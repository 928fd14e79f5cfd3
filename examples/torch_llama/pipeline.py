"""This rank's stages, the schedule that trains them, and a second schedule that evaluates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from layout import CLASSES, SINGLE, Layout
from stages import LlamaStage, Stage, loss_fn
from torch import Tensor
from torch.distributed.pipelining import schedules
from transformers import LlamaForCausalLM

WEIGHT_DECAY = 0.1
EVALUATION_BATCHES = 4
Batch = tuple[Tensor, Tensor]
"""Tokens and labels of a whole batch, on the host."""


def clip_grad_norm_(parameters: list[Tensor], max_norm: float) -> Tensor:
    """Clip gradients by their norm over all stages; every rank waits for the others'."""
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    total **= 2.0
    dist.all_reduce(total)
    total **= 0.5
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


class Trainer:
    """One rank's part of a pipeline. Every method is called on all ranks with the same arguments."""

    def __init__(self, layout: Layout, whole: LlamaForCausalLM, device: torch.device, lr: float, bf16: bool) -> None:
        self.layout = layout
        self.device = device
        self.max_norm: float | None = None  # of the gradients of all stages; None does not clip
        self.finished_steps = 0
        mine = layout.stages_of(dist.get_rank())
        self.stages = {index: LlamaStage(whole, layout.layers_of(index), bf16).float().to(device) for index in mine}
        self.optimizers = [
            torch.optim.AdamW(stage.parameters(), lr=lr, weight_decay=WEIGHT_DECAY) for stage in self.stages.values()
        ]
        self.schedule = self._schedule()
        # With stages of its own around the same modules: switching one schedule between step() and eval() would
        # lay its stages out anew each time, and eval() divides whatever gradients there are.
        self._evaluation = self._schedule(scale_grads=False)

    @property
    def reports(self) -> bool:
        """Whether this is the rank that has the losses."""
        return self.layout.stages - 1 in self.stages

    def step(self, batch: Batch) -> Tensor | None:
        """Train on one batch; its mean loss, on the rank of the last stage."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self._run(self.schedule.step, batch)
        if self.max_norm is not None:
            clip_grad_norm_([p for stage in self.stages.values() for p in stage.parameters()], self.max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.finished_steps += 1
        return loss

    @torch.no_grad()
    def evaluate(self, batches: Any) -> Tensor | None:
        """The mean loss of the first few batches, on the rank of the last stage; trains nothing."""
        for stage in self.stages.values():
            stage.eval()
        losses = [self._run(self._evaluation.eval, batches[number]) for number in range(EVALUATION_BATCHES)]
        for stage in self.stages.values():
            stage.train()
        return torch.stack([loss for loss in losses if loss is not None]).mean() if self.reports else None

    def _schedule(self, scale_grads: bool = True) -> Any:
        stages = [Stage(module, index, self.layout.stages, self.device) for index, module in self.stages.items()]
        kind = getattr(schedules, CLASSES[self.layout.schedule])
        one_or_all: Any = stages[0] if self.layout.schedule in SINGLE else stages
        return kind(one_or_all, self.layout.microbatches, loss_fn=loss_fn, scale_grads=scale_grads)

    def _run(self, call: Callable[..., Any], batch: Batch) -> Tensor | None:
        tokens, labels = (part.to(self.device) for part in batch)
        losses: list[Tensor] = []
        inputs = (tokens,) if 0 in self.stages else ()
        targets = {"target": labels, "losses": losses} if self.reports else {}
        call(*inputs, **targets, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None
