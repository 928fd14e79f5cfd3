"""One rank's part of a random pipeline's run, with everything that a step leaves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_pools import destroy_groups
from stage_cases import MICROBATCHES, Case, Stage, batch, example, seen_by_hooks
from stage_parts import ROWS, WIDTH
from torch import nn

import tf_adapters.torch_pipelining

SECTION: dict[str, Any] = {
    **{"max_freeze_ratio": 0.8, "warmup_steps": 0, "monitoring_steps": 20, "progressive_steps": 0, "on_error": "raise"},
    "replan_interval": 1000,
    "replan_threshold": 0.0,
}
Named = dict[str, torch.Tensor | None]

GROUPS: list[Any] = []


def pipeline_group() -> Any:
    """A group of both ranks for what goes from stage to stage: not the world's, so that it can be given up."""
    if not GROUPS:
        GROUPS.append(dist.new_group())
    return GROUPS[0]


def forget_groups(kept: list[Any]) -> None:
    GROUPS.clear()
    destroy_groups(kept=kept)


class Training:
    """One rank's part of a run."""

    def __init__(self, case: Case) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining import schedules as host

        self.case, count, rank = case, len(case.stages), dist.get_rank()
        self.models = {index: Stage(case, index) for index in ((rank,) if count == 2 else (rank, rank + 2))}
        sent = tuple(torch.empty(ROWS, WIDTH, requires_grad=True) for _ in range(case.pair + 1))
        group, stages = pipeline_group(), []
        for i, model in self.models.items():  # told what they take and give, they make no pass to find it out
            takes, gives = sent if i else example(case, 0), sent if i < count - 1 else sent[:1]
            stages.append(PipelineStage(model, i, count, torch.device("cpu"), takes, gives, group=group))
        kind = getattr(host, case.schedule)
        self.schedule = kind(stages[0] if count == 2 else stages, MICROBATCHES, loss_fn=self._loss)
        trained = [p for model in self.models.values() for p in model.parameters() if p.requires_grad]
        trained = list(dict.fromkeys(trained)) or [nn.Parameter(torch.zeros(1))]
        if case.adaptive:
            self.optimizer: Any = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
        else:
            self.optimizer = torch.optim.SGD(trained, lr=1e-2, momentum=0.9, weight_decay=0.1)
        self.adapter: Any = None
        self.own_steps: dict[int, int] = {}  # by a step's number, that of the run
        self._gradients: Named = {}
        self._recorder: Any = None

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.models[len(self.case.stages) - 1].loss(outputs, targets)

    def attach(self, section: dict[str, Any], folder: str) -> None:
        settings = {**SECTION, **section, "output_dir": folder}
        self.adapter = tf_adapters.torch_pipelining.attach(self.schedule, settings, optimizer=self.optimizer)

    def gradients(self) -> Named:
        return {f"stages.{i}.{n}": p.grad for i, m in self.models.items() for n, p in m.named_parameters()}

    def record(self) -> None:
        """Keep what the optimizer gets, as the last of its hooks."""
        if self._recorder is not None:
            self._recorder.remove()

        def keep(*_: Any) -> None:
            self._gradients = {n: None if g is None else g.detach().clone() for n, g in self.gradients().items()}

        self._recorder = self.optimizer.register_step_pre_hook(keep)

    def step(self, number: int) -> dict[str, Named]:
        """One update, and all that it has left."""
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)
        for model in self.models.values():
            model.begin(number)
        if self.adapter is not None:
            self.own_steps[number] = self.adapter.controller.step
        inputs, targets = batch(self.case, number)
        losses: list[torch.Tensor] = []
        first, last = 0 in self.models, len(self.case.stages) - 1 in self.models
        self.schedule.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}))
        self.optimizer.step()
        for model in self.models.values():
            model.end()
        return {
            "loss": {str(n): loss.detach() for n, loss in enumerate(losses)},
            "gradient": dict(self._gradients),
            "value": {n: t.detach().clone() for n, t in self.state().items()},
            "hook": {f"stages.{i}.{n}": t for i, m in self.models.items() for n, t in self.seen(m).items()},
        }

    def seen(self, model: Stage) -> Named:
        """Return what hooks have seen; nothing for split backwards, where torch runs no hook after accumulation."""
        seen: Named = dict(seen_by_hooks(model))
        return {} if "ZeroBubble" in self.case.schedule else seen

    def state(self) -> dict[str, torch.Tensor]:
        return {f"stages.{i}.{n}": t for i, m in self.models.items() for n, t in m.state_dict().items()}

    def masks(self) -> dict[int, set[str]]:
        """The names that each microbatch of the next step freezes, on all stages."""
        controller = self.adapter.controller
        return {
            m: {
                f"stages.{s}.{name}"
                for s in range(len(self.case.stages))
                for name in controller.frozen_parameters(controller.step, s, m)
            }
            for m in range(MICROBATCHES)
        }


def gathered(mine: Any) -> dict[str, Any]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return {name: value for of_rank in everywhere for name, value in of_rank.items()}
