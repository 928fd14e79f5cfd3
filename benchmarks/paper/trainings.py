"""A cell's training on its host's own engine, from tiny layers: this rank's part of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.paper.cells import Cell
from benchmarks.paper.models import POSITIONS, WIDTH, build, microbatch

Section = dict[str, Any]
DIFFERENT_BATCHES = 4


@dataclass
class Training:
    """One training on this rank: a whole step, and the adapter, None for the host alone."""

    step: Callable[[], Any]
    adapter: Any


def setup(host: str) -> None:
    """Join the ranks of a pool; runs first in every rank."""
    logging.getLogger("tf_adapters").setLevel(logging.WARNING)
    if host == "deepspeed":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo", verbose=False)
    elif host == "megatron-core":
        from tf_adapters.testing.megatron_on_cpu import install

        install()
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo")


def start(cell: Cell, section: Section | None) -> Training:
    """A training on a fresh model, frozen as the section says, or of the host alone. Called on all ranks at once."""
    return {"torch": _torch, "deepspeed": _deepspeed, "megatron-core": _megatron}[cell.host](cell, section)


def _layers(cell: Cell, stage: int) -> list[nn.Module]:
    first, last = list(pairwise(cell.boundaries))[stage]
    return build(cell.of, first, last)


def _microbatches(cell: Cell) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end; made in advance, since a step is timed."""
    made = [microbatch(cell.of, number) for number in range(DIFFERENT_BATCHES * cell.microbatches)]
    return (made[number % len(made)] for number in count())


def _torch(cell: Cell, section: Section | None) -> Training:
    from torch.distributed.pipelining import PipelineStage, schedules

    import tf_adapters.torch_pipelining

    kind = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }[cell.schedule]
    stages = [
        PipelineStage(nn.Sequential(*_layers(cell, index)), index, cell.stages, torch.device("cpu"))
        for index in cell.stages_of_rank[dist.get_rank()]
    ]
    schedule: Any = kind(stages[0] if len(stages) == 1 else stages, cell.microbatches, loss_fn=cross_entropy)  # type: ignore[arg-type]
    optimizers = [torch.optim.AdamW(stage.submod.parameters(), lr=1e-4) for stage in stages]
    data = _microbatches(cell)
    has_input, has_loss = any(s.is_first for s in stages), any(s.is_last for s in stages)

    def step() -> None:
        samples = [next(data) for _ in range(cell.microbatches)]
        inputs, labels = (torch.cat(part) for part in zip(*samples, strict=True))
        for optimizer in optimizers:
            optimizer.zero_grad()
        schedule.step(*([inputs] if has_input else []), **({"target": labels} if has_loss else {}))
        for optimizer in optimizers:
            optimizer.step()

    adapter = None
    if section is not None:
        adapter = tf_adapters.torch_pipelining.attach(schedule, section, optimizer=optimizers)
    return Training(step, adapter)


def _deepspeed(cell: Cell, section: Section | None) -> Training:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import tf_adapters.deepspeed

    class Cut(PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
        """Stages with the cell's boundaries, for which ``partition_method`` has no word."""

        def _partition_layers(self, method: str = "") -> None:
            self.parts = cell.boundaries
            self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    alone = {"method": "none", "max_freeze_ratio": 0.0}
    settings = {**(alone if section is None else section), "schedule": cell.schedule}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": cell.microbatches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "timely_freeze": settings,
    }
    model = Cut(layers=build(cell.of, 0, len(cell.of.layers)), num_stages=cell.stages, loss_fn=cross_entropy)
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    needed = section is not None or cell.schedule != "1f1b"  # which is DeepSpeed's own
    adapter = tf_adapters.deepspeed.attach(engine) if needed else None
    return Training(partial(engine.train_batch, _microbatches(cell)), adapter)


def _megatron(cell: Cell, section: Section | None) -> Training:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    import tf_adapters.megatron

    chunks_of_rank = cell.stages // cell.ranks
    sizes: dict[str, Any] = {"pipeline_model_parallel_size": cell.ranks}
    sizes["virtual_pipeline_model_parallel_size"] = chunks_of_rank if chunks_of_rank > 1 else None
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=cell.stages,
        hidden_size=WIDTH,
        num_attention_heads=1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=False,
        overlap_p2p_comm=chunks_of_rank > 1,
        pipeline_dtype=torch.float32,
        finalize_model_grads_func=finalize_model_grads,
        **sizes,
    )
    mine = cell.stages_of_rank[dist.get_rank()]
    plain = [Chunk(config, cell, stage, place if chunks_of_rank > 1 else None) for place, stage in enumerate(mine)]
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunks = [DistributedDataParallel(config, ddp, c, disable_bucketing=i > 0) for i, c in enumerate(plain)]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=0.0), chunks)
    config.grad_scale_func = optimizer.scale_loss
    data = [_microbatches(cell) for _ in chunks]

    def step() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=cell.microbatches,
            seq_length=POSITIONS,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()

    adapter = None
    if section is not None:
        adapter = tf_adapters.megatron.attach(chunks, optimizer, section, num_microbatches=cell.microbatches)
    return Training(step, adapter)


class Chunk(nn.Module):
    """A stage as Megatron's schedules want it: hidden states have the shape (positions, 1, width)."""

    share_embeddings_and_output_weights = False

    def __init__(self, config: Any, cell: Cell, stage: int, place: int | None) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config, self.vp_stage, self.model_type = config, place, ModelType.encoder_or_decoder
        self.pre_process, self.post_process = stage == 0, stage == cell.stages - 1
        self.layers = nn.Sequential(*_layers(cell, stage))
        self._hidden: Any = None

    def set_input_tensor(self, tensor: Any) -> None:
        self._hidden = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        x = self.layers(inputs if self.pre_process else self._hidden.squeeze(1))
        return cross_entropy(x, labels) if self.post_process else x.unsqueeze(1)


def _forward_step(data: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    return model(*next(data)), lambda loss: (loss, {"loss": loss.detach().clone()})
