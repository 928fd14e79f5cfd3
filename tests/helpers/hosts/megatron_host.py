"""Megatron-Core's 1F1B schedule with its DDP and optimizer, for the contract tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_ranks import (
    CHUNKS,
    Case,
    build_chunks,
    build_optimizer,
    by_name,
    full_gradients,
    initialize,
    main_gradient,
    plain_copies,
    run_batch,
    setup,
    teardown,
    values,
    zero_gradients,
)

from hosts import MICROBATCHES, STAGES, Tensors

__all__ = ["MegatronTraining", "build", "forget", "setup", "start", "teardown"]


class MegatronTraining:
    """A small GPTModel; what is left of the ranks are data-parallel replicas."""

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.case = Case(pp=STAGES, microbatches=MICROBATCHES)
        initialize(self.case)
        self.chunks = build_chunks(self.case)
        self.optimizer = build_optimizer(self.case, self.chunks)
        self.adapter = self.controller = None
        self._gradients: Tensors = {}
        if settings is not None:
            self.attach(settings)

    def attach(self, settings: dict[str, Any]) -> None:
        import tf_adapters.megatron

        self.adapter = tf_adapters.megatron.attach(self.chunks, self.optimizer, settings, num_microbatches=MICROBATCHES)
        self.controller = self.adapter.controller

    def step(self, number: int) -> list[float]:
        zero_gradients(self.chunks, self.optimizer)
        losses = run_batch(self.case, self.chunks, number, range(MICROBATCHES))
        self._gradients = by_name(self.case, self.chunks, main_gradient)
        self.optimizer.step()
        return [float(entry["loss"]) for entry in losses]

    def parameters(self) -> Tensors:
        return by_name(self.case, self.chunks, values)

    def gradients(self) -> Tensors:
        return self._gradients

    def full_gradients(self, number: int) -> list[Tensors]:
        return full_gradients(self.case, self.chunks, plain_copies(self.case), number)

    def save(self, folder: str) -> None:
        state = {
            "model": [chunk.state_dict() for chunk in self.chunks],
            "optimizer": self.optimizer.state_dict(),
            "freezing": self.controller and self.controller.state_dict(),
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(state, Path(folder) / f"rank{dist.get_rank()}.pt")
        dist.barrier()

    def load(self, folder: str) -> None:
        state = torch.load(Path(folder) / f"rank{dist.get_rank()}.pt")
        for chunk, saved in zip(self.chunks, state["model"], strict=True):
            chunk.load_state_dict(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.controller is not None:
            self.controller.load_state_dict(state["freezing"])

    def detach(self) -> None:
        self.adapter.detach()

    def objects(self) -> dict[str, Any]:
        from megatron.core.utils import get_model_config

        from tf_adapters.megatron.optimizers import inner_of, leaves

        chunks = {f"chunk {index}": chunk for index, chunk in enumerate(self.chunks)}
        inner = {f"inner {index}": inner_of(leaf) for index, leaf in enumerate(leaves(self.optimizer))}
        return {**chunks, **inner, "optimizer": self.optimizer, "config": get_model_config(self.chunks[0])}


start = build = MegatronTraining
forget = CHUNKS.clear
