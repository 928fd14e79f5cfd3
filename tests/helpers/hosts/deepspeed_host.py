"""DeepSpeed's pipeline engine, 1F1B, for the contract tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed_ranks import (
    ENGINES,
    Case,
    GradientRecorder,
    Ordinary,
    batch,
    build_engine,
    loss_fn,
    parameters_of,
    setup,
    teardown,
)

from hosts import MICROBATCHES, STAGES, Tensors
from tf_adapters.testing import masked_gradients

__all__ = ["DeepSpeedTraining", "build", "forget", "setup", "start", "teardown"]


class DeepSpeedTraining:
    """A small language model on the real engine."""

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.case = Case(stages=STAGES, section=settings)
        self.engine = build_engine(self.case)
        self.attach()
        self.recorder = GradientRecorder(self.engine)

    def attach(self, settings: dict[str, Any] | None = None) -> None:
        import tf_adapters.deepspeed

        self.adapter = tf_adapters.deepspeed.attach(self.engine, settings)
        self.controller = self.adapter and self.adapter.controller

    def step(self, number: int) -> list[float]:
        data = batch(number, self.engine.grid.data_parallel_id, MICROBATCHES)
        return [float(self.engine.train_batch(iter(data)))]

    def parameters(self) -> Tensors:
        return self._by_stage(parameters_of(self.engine))

    def gradients(self) -> Tensors:
        return self._by_stage(self.recorder.latest)

    def full_gradients(self, number: int) -> list[Tensors]:
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, (self.engine.stage_id, parameters_of(self.engine)))
        model = Ordinary(self.case, [state for _, state in sorted(dict(states).items())])
        replicas = dist.get_world_size() // STAGES
        found = []
        for microbatch in range(MICROBATCHES):
            per_replica = []
            for replica in range(replicas):
                data = [batch(number, replica, MICROBATCHES)[microbatch]]
                per_replica.append(masked_gradients(model, data, loss_fn, lambda _: ()))
            mean = {name: torch.stack([g[name] for g in per_replica]).mean(0) for name in per_replica[0]}
            found.append(
                {(stage, name): mean[model.rename(name, stage)] for stage, name in self.parameters()},
            )
        return found

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder)

    def load(self, folder: str) -> None:
        self.engine.load_checkpoint(folder)

    def detach(self) -> None:
        self.adapter.detach()

    def objects(self) -> dict[str, Any]:
        engine = self.engine
        return {"engine": engine, "optimizer": engine.optimizer, "inner": engine.basic_optimizer}

    def _by_stage(self, named: dict[str, torch.Tensor]) -> Tensors:
        return {(self.engine.stage_id, name): value for name, value in named.items()}


start = build = DeepSpeedTraining
forget = ENGINES.clear
