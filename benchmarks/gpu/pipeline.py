"""LLaMA layers in torch.distributed.pipelining: the training that most parts of the acceptance on GPUs run.

In bf16 on a GPU, in fp32 on a CPU; 1F1B unless another schedule is asked for. Every stage is a middle one: an input
gradient goes through all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation spells it

import tf_adapters.torch_pipelining
from benchmarks.gpu.parts import Options, section
from tf_adapters.testing import force_plan

BATCHES = 2  # used in turn
ADAM = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
SCHEDULES = {
    "1F1B": schedules.Schedule1F1B,
    "GPipe": schedules.ScheduleGPipe,
    "interleaved 1F1B": schedules.ScheduleInterleaved1F1B,
    "ZBV": schedules.ScheduleZBVZeroBubble,
}
TWO_STAGES = ("interleaved 1F1B", "ZBV")
"""Schedules with two stages on each rank, each with half of the rank's layers."""


@dataclass(frozen=True)
class Size:
    """A rank's ``layers``, and its microbatches of ``rows`` x ``context`` tokens."""

    width: int
    heads: int
    key_heads: int
    hidden: int
    layers: int
    context: int
    rows: int
    microbatches: int


LLAMA_1B = Size(width=2048, heads=32, key_heads=8, hidden=8192, layers=8, context=2048, rows=2, microbatches=8)
"""Layers of LLaMA 3.2 1B."""
TINY = Size(width=32, heads=4, key_heads=2, hidden=64, layers=4, context=16, rows=2, microbatches=4)


class Layer(nn.Module):
    """One layer of LLaMA, without rotary embeddings: they have no weights and take next to no time."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        of_keys = size.width // size.heads * size.key_heads
        self.heads, self.key_heads = size.heads, size.key_heads
        self.norm_1, self.norm_2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.q, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.width, of_keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        query = self._split(self.q(y), self.heads)
        keys, values = (self._split(of(y), self.key_heads) for of in (self.k, self.v))
        repeats = self.heads // self.key_heads
        keys, values = (t.repeat_interleave(repeats, dim=1) for t in (keys, values))
        attended = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    @staticmethod
    def _split(t: torch.Tensor, heads: int) -> torch.Tensor:
        return t.reshape(*t.shape[:2], heads, -1).transpose(1, 2)


class Stage(nn.Module):
    """Layers whose input always requires a gradient."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """This rank's stages, their schedule and optimizer, and the adapter once there is one."""

    def __init__(
        self,
        options: Options,
        size: Size | None = None,
        schedule: str = "1F1B",
        optimizer: Callable[..., torch.optim.Optimizer] = ADAM,
    ) -> None:
        self.options, self.size = options, size or (TINY if options.tiny else LLAMA_1B)
        self.rank, self.ranks, self.device = dist.get_rank(), dist.get_world_size(), options.target()
        dtype = torch.bfloat16 if options.cuda else torch.float32
        self._batches = batches(self.size, self.device, dtype)
        torch.manual_seed(self.rank)
        indices = stages_of_rank(schedule, self.rank, self.ranks)
        of_stage = smaller(self.size, self.size.layers // len(indices))
        with self.device:
            self.modules = [Stage(of_stage).to(dtype) for _ in indices]
        stages: list[Any] = [self._stage(*each, len(indices)) for each in zip(self.modules, indices, strict=True)]
        self._first, self._last = any(s.is_first for s in stages), any(s.is_last for s in stages)
        given = stages[0] if len(stages) == 1 else stages
        self.schedule: Any = SCHEDULES[schedule](given, n_microbatches=self.size.microbatches, loss_fn=mean_square)
        self.optimizer = optimizer([parameter for module in self.modules for parameter in module.parameters()])
        self.finished = 0
        self.loss: torch.Tensor | None = None  # of the newest step, where the last stage is
        self.adapter: Any = None

    def _stage(self, module: nn.Module, index: int, of_rank: int) -> PipelineStage:
        example = self._batches[0][0][: self.size.rows]
        of_others = example.clone().requires_grad_()  # whose gradient is sent back
        taken = of_others if index else example.clone()
        return PipelineStage(module, index, of_rank * self.ranks, self.device, input_args=taken, output_args=of_others)

    def batch(self) -> None:
        """Run the forwards and backwards of a step."""
        inputs, target = self._batches[self.finished % BATCHES]
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self._first else ()
        self.schedule.step(*arguments, **({"target": target, "losses": losses} if self._last else {}))
        if losses:
            self.loss = torch.stack([loss.detach() for loss in losses]).mean()

    def update(self) -> None:
        """Run the rest of a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.finished += 1

    def step(self) -> None:
        """Run a whole training step."""
        self.batch()
        self.update()

    def attach(self, **settings: Any) -> Any:
        """Attach an adapter. Called on all ranks at once."""
        given = section(self.options, **settings)
        self.adapter = tf_adapters.torch_pipelining.attach(self.schedule, given, optimizer=self.optimizer)
        return self.adapter

    def attach_planned(self, ratio: float, **settings: Any) -> Any:
        """Attach an adapter in stable freezing, with ``ratio`` of every backward frozen."""
        adapter = self.attach(**settings)
        force_plan(adapter.controller, ratio)
        return adapter

    def detach(self) -> None:
        self.adapter.detach()
        self.adapter = None


@functools.cache
def batches(size: Size, device: torch.device, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Return the inputs and targets of each batch, the same on every rank. Trainings share them."""
    whole = (size.microbatches * size.rows, size.context, size.width)
    generator = torch.Generator(device).manual_seed(1)
    return [
        [torch.randn(whole, device=device, generator=generator).to(dtype) for _ in range(2)] for _ in range(BATCHES)
    ]


def stages_of_rank(schedule: str, rank: int, ranks: int) -> tuple[int, ...]:
    """A rank's stages, in a loop or, for ZBV, in a V."""
    if schedule not in TWO_STAGES:
        return (rank,)
    return (rank, 2 * ranks - 1 - rank) if schedule == "ZBV" else (rank, rank + ranks)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def smaller(size: Size, layers: int) -> Size:
    """The same layers, fewer of them."""
    return replace(size, layers=layers)
