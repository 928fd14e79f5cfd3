"""One rank's stage of a network of the accuracy study: trained, evaluated and probed by torch's own pipelining."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.accuracy import tasks as accuracy_tasks
from benchmarks.accuracy.tasks import Task

STAGES = 2
CLASSES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
Batch = tuple[Tensor, Tensor]
AVERAGING = 0.95
"""Share that the averaged weights keep of themselves in a step: about the last 20 steps count."""


def setup() -> None:
    """Runs first in every rank."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class Chain(nn.Module):
    """Consecutive layers of a network under their numbers in the whole of it."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def optimisation(
    task: Task, module: nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR, AveragedModel]:
    """AdamW of what a module trains, its warm-up, and the moving average of the weights, which is evaluated."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=task.lr, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1, (done + 1) / task.warmup))
    return optimizer, warmup, AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(AVERAGING))


def score(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean loss per sample, and accuracy."""
    loss = nn.functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(dim=-1) == labels).float().mean().item()


class Pipeline:
    """This rank's stage, its optimizer, and schedules over it. Every method is called on all ranks at once."""

    def __init__(self, task: Task, schedule: str, seed: int) -> None:
        whole = accuracy_tasks.layers_of(task.name, seed)
        self.task, self.stage = task, dist.get_rank()
        numbers = range(task.boundary) if self.stage == 0 else range(task.boundary, len(whole))
        self.module = Chain({number: whole[number] for number in numbers})
        self.optimizer, self.warmup, self._averaged = optimisation(task, self.module)
        self.schedule = self._schedule(schedule, self.module)
        self._evaluating = self._schedule("gpipe", self._averaged.module, scale_grads=False)
        self._probing = self._schedule("gpipe", self.module)

    def _schedule(self, name: str, module: nn.Module, scale_grads: bool = True) -> Any:
        stage = PipelineStage(module, self.stage, STAGES, torch.device("cpu"))
        kind = getattr(schedules, CLASSES[name])
        return kind(stage, self.task.microbatches, loss_fn=nn.functional.cross_entropy, scale_grads=scale_grads)

    @property
    def is_last(self) -> bool:
        return self.stage == STAGES - 1

    def step(self, batch: Batch) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        self._run(self.schedule.step, batch)
        self.optimizer.step()
        self.warmup.step()

    def average(self) -> None:
        """Take the weights as they are now into the averaged ones, which are evaluated."""
        self._averaged.update_parameters(self.module)

    def _run(self, call: Callable[..., Any], batch: Batch, **more: Any) -> Any:
        inputs = (batch[0],) if self.stage == 0 else ()
        targets: dict[str, Any] = {"target": batch[1], "losses": []} if self.is_last else {}
        return call(*inputs, **targets, **more)

    @torch.no_grad()
    def evaluate(self, data: Any) -> tuple[float, float]:
        """Mean loss per sample and accuracy of the averaged weights; samples that fill no batch are left out."""
        samples, labels = data.tensors
        size, found = self.task.batch, []
        count = min(len(labels), self.task.held_out) // size * size
        for start in range(0, count, size):
            batch = samples[start : start + size], labels[start : start + size]
            found.append(self._run(self._evaluating.eval, batch))
        result: list[Any] = [None]
        if self.is_last:
            result = [score(torch.cat(found), labels[:count])]
        dist.broadcast_object_list(result, src=STAGES - 1)
        return result[0]

    def energies(self, first: Batch, second: Batch) -> dict[str, tuple[float, float]]:
        """Squared norms of each of this stage's tensors in the gradient, in two ways. Nothing is trained or frozen.

        The first is an unbiased estimate for the gradient of the objective: the scalar product of the gradients of two
        independent batches. The second is a batch's own, the mean of both: it has the batch's noise in it.
        """
        ours, theirs = self._gradients(first), self._gradients(second)
        self.optimizer.zero_grad()
        return {
            name: (float((ours[name] * theirs[name]).sum()), float((ours[name] ** 2 + theirs[name] ** 2).sum() / 2))
            for name in ours
        }

    def _gradients(self, batch: Batch) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        self._run(self._probing.step, batch)
        return {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None}
