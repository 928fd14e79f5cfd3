"""Megatron-Core's pieces put together to one training step: schedule, optimizer, learning rate, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from model import Sizes, build_chunks  # isort: split

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from text import ByteDataset

import tf_adapters.megatron

EVALUATION_BATCHES = 4
WEIGHT_DECAY = 0.1
Data = list[Iterator[tuple[torch.Tensor, torch.Tensor]]]
"""For each model chunk the same microbatches: tokens and labels."""


class Trainer:
    """This rank's part of a model, and what trains it."""

    def __init__(self, sizes: Sizes, lr: float = 1e-3, lr_warmup: int = 10) -> None:
        if not parallel_state.is_initialized():
            if sizes.in_v:
                tf_adapters.megatron.place_in_v()
            parallel_state.initialize_model_parallel(**sizes.parallel)
        self.sizes = sizes
        self.finished_steps = 0
        self.chunks = build_chunks(sizes)
        self.optimizer = get_megatron_optimizer(optimizer_config(sizes, lr), self.chunks)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=lr,
            min_lr=0.0,
            lr_warmup_steps=lr_warmup,
            lr_decay_steps=2**31,
            lr_decay_style="constant",
            start_wd=WEIGHT_DECAY,
            end_wd=WEIGHT_DECAY,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        config = get_model_config(self.chunks[0])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if sizes.distributed_optimizer:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if sizes.virtual_pipeline > 1 else no_sync[0]

    def data(self, text: ByteDataset, first_step: int = 0) -> Data:
        """This replica's endless share of the text, from the step at which to go on."""
        return [self._microbatches(text, first_step * self.sizes.microbatches) for _ in self.chunks]

    def step(self, data: Data) -> torch.Tensor | None:
        """Train on one batch; this replica's loss, on the ranks of the last pipeline stage."""
        self.scheduler.step(1)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._run(data, self.sizes.microbatches)
        self.optimizer.step()
        self.finished_steps += 1
        return loss

    def evaluate(self, text: ByteDataset) -> torch.Tensor | None:
        """The loss on a few batches of text, on the ranks of the last pipeline stage; trains nothing."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad(), self.whole_parameters():
            loss = self._run(self.data(text), EVALUATION_BATCHES * self.sizes.microbatches, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return loss

    def save(self, folder: Path, **more: Any) -> None:
        """Write this rank's part of a checkpoint, and whatever else belongs into it."""
        folder.mkdir(parents=True, exist_ok=True)
        with self.whole_parameters():
            state = {
                "sizes": self.sizes,
                "finished_steps": self.finished_steps,
                "model": [chunk.state_dict() for chunk in self.chunks],
                "optimizers": [(inner.state_dict(), updated(inner)) for inner in self.torch_optimizers()],
                "scheduler": self.scheduler.state_dict(),
            }
            torch.save(state | more, part_of_rank(folder))

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on where ``save`` was called; everything that it wrote. Only for a trainer that has not trained yet."""
        file = part_of_rank(folder)
        if not file.is_file():
            raise SystemExit(f"no such checkpoint: {file}")
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
        if state["sizes"] != self.sizes:
            raise SystemExit(f"the checkpoint in {folder} has other sizes: {state['sizes']}")
        for chunk, saved in zip(self.chunks, state["model"], strict=True):
            chunk.load_state_dict(saved)
        for inner, (inner_state, parameters) in zip(self.torch_optimizers(), state["optimizers"], strict=True):
            inner.load_state_dict(inner_state)
            for parameter, value in zip(updated(inner), parameters, strict=True):
                parameter.copy_(value)
        self.scheduler.load_state_dict(state["scheduler"])
        self.finished_steps = state["finished_steps"]
        return state

    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """What does the arithmetic inside Megatron's optimizer, for this rank's parameters or its shards of them."""
        wrappers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [wrapper.optimizer for wrapper in wrappers if wrapper.optimizer is not None]

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """While this is open no parameter waits for an all-gather that overlaps with the next forward."""
        chunks = self.chunks if self.sizes.distributed_optimizer else []
        for chunk in chunks:
            chunk.disable_forward_pre_hook()
        yield
        for chunk in chunks:
            chunk.enable_forward_pre_hook()

    def _run(self, data: Data, microbatches: int, forward_only: bool = False) -> torch.Tensor | None:
        """Megatron's pipeline schedule over some microbatches; their mean loss, on the last stage."""
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=self.chunks,
            num_microbatches=microbatches,
            seq_length=self.sizes.context,
            micro_batch_size=self.sizes.micro_batch,
            forward_only=forward_only,
        )
        return torch.stack(losses).mean() if losses else None

    def _microbatches(self, text: ByteDataset, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        replica = parallel_state.get_data_parallel_rank()
        replicas = parallel_state.get_data_parallel_world_size()
        size = self.sizes.micro_batch
        for number in count(first):
            start = (number * replicas + replica) * size
            windows = [text[place % len(text)] for place in range(start, start + size)]
            tokens, labels = (torch.stack(parts).cuda() for parts in zip(*windows, strict=True))
            yield tokens, labels


def optimizer_config(sizes: Sizes, lr: float) -> OptimizerConfig:
    chosen: dict[str, Any] = {"optimizer": "adam", "lr": lr, "weight_decay": WEIGHT_DECAY, "clip_grad": 1.0}
    if sizes.bf16:
        chosen |= {"bf16": True, "params_dtype": torch.bfloat16}
    if sizes.distributed_optimizer:
        chosen |= {"use_distributed_optimizer": True, "overlap_param_gather": True}
    return OptimizerConfig(**chosen)


def forward_step(data: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    """One microbatch through one model chunk, as Megatron's schedules want it."""
    tokens, labels = next(data)
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), mean_loss


def mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy per byte, in nats; a copy of it for the log, because Megatron divides the first in place."""
    loss = per_token.float().mean()
    return loss, loss.detach().clone()


def updated(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer updates: parameters, their fp32 copies or shards."""
    return [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]


def part_of_rank(folder: Path) -> Path:
    return folder / f"rank_{torch.distributed.get_rank()}.pt"
