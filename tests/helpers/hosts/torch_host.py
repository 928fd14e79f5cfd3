"""torch.distributed.pipelining's Schedule1F1B, replicas under DistributedDataParallel, for the contract tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_ranks import ROWS, Case, GradientRecorder, Layers, batch, loss_fn, plain, teardown, values
from torch_ranks import build as build_run

from hosts import MICROBATCHES, STAGES, Tensors
from tf_adapters.testing import masked_gradients

__all__ = ["TorchTraining", "build", "setup", "start", "teardown"]


def setup() -> None:
    """Nothing to prepare: the ranks have a gloo group."""


class TorchTraining:
    """A small language model in two stages."""

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.replicas = dist.get_world_size() // STAGES
        kind = "ddp" if self.replicas > 1 else ""
        self.run = build_run(Case(ranks=STAGES, microbatches=MICROBATCHES, replicas=kind))
        self.adapter = self.controller = None
        if settings is not None:
            self.attach(settings)
        self.recorder = GradientRecorder(self.run)

    def attach(self, settings: dict[str, Any]) -> None:
        import tf_adapters.torch_pipelining

        self.adapter = tf_adapters.torch_pipelining.attach(self.run.schedule, settings, optimizer=self.run.optimizers)
        self.controller = self.adapter.controller

    def step(self, number: int) -> list[float]:
        losses = [self.run.train_step(number)]
        if self.adapter is not None:
            self.adapter.finish_step()  # the ranks decide now, not before their next batch
        return losses

    def parameters(self) -> Tensors:
        return self._by_stage(values(self.run))

    def gradients(self) -> Tensors:
        return self._by_stage(self.recorder.latest)

    def full_gradients(self, number: int) -> list[Tensors]:
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, values(self.run))
        model = Layers()
        model.load_state_dict({name: value for state in states for name, value in state.items()})
        found = []
        for microbatch in range(MICROBATCHES):
            rows = slice(microbatch * ROWS, (microbatch + 1) * ROWS)
            per_replica = []
            for replica in range(self.replicas):
                tokens, labels = batch(self.run.case, number, replica)
                per_replica.append(masked_gradients(model, [(tokens[rows], labels[rows])], loss_fn, lambda _: ()))
            mean = {name: torch.stack([g[name] for g in per_replica]).mean(0) for name in per_replica[0]}
            found.append({key: mean[key[1]] for key in self.parameters()})
        return found

    def save(self, folder: str) -> None:
        state = {
            "model": [stage.submod.state_dict() for stage in self.run.stages],
            "optimizer": [optimizer.state_dict() for optimizer in self.run.optimizers],
            "freezing": self.adapter and self.adapter.state_dict(),
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(state, Path(folder) / f"rank{dist.get_rank()}.pt")
        dist.barrier()

    def load(self, folder: str) -> None:
        state = torch.load(Path(folder) / f"rank{dist.get_rank()}.pt")
        for stage, saved in zip(self.run.stages, state["model"], strict=True):
            stage.submod.load_state_dict(saved)
        for optimizer, saved in zip(self.run.optimizers, state["optimizer"], strict=True):
            optimizer.load_state_dict(saved)
        if self.adapter is not None:
            self.adapter.load_state_dict(state["freezing"])

    def detach(self) -> None:
        self.adapter.detach()

    def objects(self) -> dict[str, Any]:
        stages = {f"stage {stage.stage_index}": stage for stage in self.run.stages}
        models = {f"model {stage.stage_index}": stage.submod for stage in self.run.stages}
        optimizers = {f"optimizer {index}": optimizer for index, optimizer in enumerate(self.run.optimizers)}
        return {**stages, **models, **optimizers, "schedule": self.run.schedule}

    def _by_stage(self, named: dict[str, torch.Tensor]) -> Tensors:
        stages = {plain(n): s.stage_index for s in self.run.stages for n, _ in s.submod.named_parameters()}
        return {(stages[name], name): value for name, value in named.items()}


start = build = TorchTraining
