"""One training of the language model study, in one process that skips what the stages of a pipeline would skip.

All microbatches of a step pass at once. The adapters' taps save the inputs of weight gradients, without the tokens that
a microbatch's mask or draw leaves out. The gradient equals that of one pass for each microbatch, in less time. Only the
weights of linear layers are frozen, 97% of the freezable work.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.language_model.network import Stage, stages
from benchmarks.language_model.tasks import PRETRAINING, TASKS, Rows, Task, rows_of
from benchmarks.language_model.ways import DRAWING, MICROBATCHES, WAYS, Way, planned, speedup
from benchmarks.shared.files import ROOT
from tf_adapters.hosts.units import units_of
from tf_adapters.selection.masks import Mask, StageMasks
from tf_adapters.training.step_masks import StepMasks
from tf_adapters.weight_gradients.tapped_layer import plain_layer
from tf_adapters.weight_gradients.taps import RowSampler, StageTaps
from tf_adapters.weight_gradients.tokens import Chosen, TokenSampler
from tf_adapters.weight_gradients.tokens import Rows as TokenRows

WARMUP = 20
NEWEST = 0.05
"""Share of the newest weights in the evaluated average, which removes noise as a falling learning rate would."""

PRETRAINED = ROOT / "runs" / "language_model"


class EvenSampler(TokenSampler):
    """Draws every token with the same chance."""

    def choose(self, weight: str, sizes: torch.Tensor, count: int) -> Chosen:
        return super().choose(weight, torch.ones_like(sizes), count)


class MaskedRows:
    """All tokens of a microbatch, or none for the weights of these names."""

    def __init__(self, frozen: Collection[str]) -> None:
        self._frozen = frozenset(frozen)

    def rows(self, weight: str, inputs: torch.Tensor, gradient: torch.Tensor) -> TokenRows:
        return (inputs[:0], gradient[:0]) if weight in self._frozen else (inputs, gradient)


class BatchRows:
    """The tokens of all microbatches of a step, each microbatch's chosen by its own sampler."""

    def __init__(self, samplers: Sequence[RowSampler]) -> None:
        self._samplers = samplers

    def rows(self, weight: str, inputs: torch.Tensor, gradient: torch.Tensor) -> TokenRows:
        microbatches = zip(self._samplers, *(t.chunk(len(self._samplers)) for t in (inputs, gradient)), strict=True)
        chosen_inputs, chosen_gradients = zip(*(s.rows(weight, x, g) for s, x, g in microbatches), strict=True)
        return torch.cat(chosen_inputs), torch.cat(chosen_gradients)


class Training:
    """One training. Its clock, ``elapsed``, counts steps of the host alone."""

    def __init__(self, task: Task, way: Way, seed: int) -> None:
        self.task, self.way, self.seed, self.plan = task, way, seed, planned(way)
        self.step, self.elapsed = 0, 0.0
        self.stages = _first_weights(task, seed)
        self.taps = {index: StageTaps(stage, plain_layer, trusted=True) for index, stage in enumerate(self.stages)}
        for taps in self.taps.values():
            taps.install()
        weights = {i: {n: p for n, p in s.named_parameters() if n in self.taps[i].names} for i, s in self._numbered()}
        units = {i: [u for u in units_of(s) if u.names[0] in weights[i]] for i, s in self._numbered()}
        self.draws = StageMasks(units, seed, tokens=way.samples_tokens)
        self.step_masks = StepMasks(self._draw, weights, ties=())
        self.parameters = [p for stage in self.stages for p in stage.parameters()]
        self.averages = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, betas=(0.9, 0.95), weight_decay=0.1)

    def _numbered(self) -> Iterator[tuple[int, Stage]]:
        yield from enumerate(self.stages)

    def _draw(self, stage: int) -> Sequence[Mask]:
        ratios = [self.plan.ratio_of_microbatch[stage, m] for m in range(self.way.microbatches)]
        if self.way.independent:  # each draw is that of a step with one microbatch
            first = self.step * len(ratios)
            return [self.draws.draw(first + m, stage, [ratio])[0] for m, ratio in enumerate(ratios)]
        return self.draws.draw(self.step, stage, ratios)

    def train_step(self, rows: Rows) -> None:
        self.step += 1
        self.step_masks.clear()
        self.elapsed += self.step_time()
        for group in self.optimizer.param_groups:
            group["lr"] = min(1.0, self.step / WARMUP) * self.task.learning_rate * self.way.learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        self._backward(rows)
        if self.way.gradient_scale == "computed_mean":
            for of_stage in self.step_masks.scales().values():
                for parameter, factor in of_stage:
                    assert parameter.grad is not None
                    parameter.grad.mul_(factor)
        for parameter in self.step_masks.held_parameters():
            parameter.grad = None
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.parameters, max(NEWEST, 1.0 / self.step))

    def step_time(self) -> float:
        """Return the time of this step, in steps of the host alone; a whole number of steps fits into the run."""
        return self.task.steps / round(self.task.steps * speedup(self.plan))

    def reaches(self, share: float) -> bool:
        """Return True if the next step would exceed this share of the time."""
        return self.elapsed + 0.5 * self.step_time() >= share * self.task.steps

    def _backward(self, rows: Rows) -> None:
        """Compute the gradients of the batch."""
        x, labels = rows
        for index, stage in self._numbered():
            with self.taps[index].recording(0):
                x = stage(x)
        nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten()).backward()  # type: ignore[no-untyped-call]
        for index, taps in self.taps.items():
            taps.compute(0, self._sampler(index))

    def _sampler(self, stage: int) -> RowSampler | None:
        masks = [self.step_masks.of(stage, microbatch) for microbatch in range(self.way.microbatches)]
        if not any(mask.share for mask in masks):
            return None
        return BatchRows([self._of_microbatch(stage, number, mask) for number, mask in enumerate(masks)])

    def _of_microbatch(self, stage: int, microbatch: int, mask: Mask) -> RowSampler:
        if not (self.way.samples_tokens and mask.share):
            return MaskedRows(mask.names)
        sampler = EvenSampler if self.way.evenly else TokenSampler
        return sampler((self.seed, self.step, stage, microbatch), lambda _: DRAWING.kept(mask.share))

    @torch.no_grad()
    def loss(self, rows: Rows) -> float:
        """Return the loss of the averaged weights."""
        trained = [p.clone() for p in self.parameters]
        torch._foreach_copy_(self.parameters, self.averages)
        x, labels = rows
        for stage in self.stages:
            x = stage(x)
        torch._foreach_copy_(self.parameters, trained)
        return float(nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten()))


def train(task_name: str, way_name: str, seed: int) -> dict[str, Any]:
    """One training to the end of its time: losses by the share of the time."""
    torch.set_num_threads(1)
    task, way = TASKS[task_name], WAYS[way_name]
    training = Training(task, way, seed)
    test = task.test()
    curve: list[tuple[float, float]] = []
    same_steps = None
    rows = task.rows * way.microbatches
    data = task.data(rows * round(task.steps * speedup(training.plan)), seed)
    while not training.reaches(1.0):
        training.train_step(rows_of(data, range(training.step * rows, (training.step + 1) * rows)))
        if training.step == task.steps:
            same_steps = training.loss(test)
        if training.reaches(share := (len(curve) + 1) / task.evaluations):
            curve.append((share, training.loss(test)))
    return {
        "task": task_name,
        "way": way_name,
        "seed": seed,
        "speedup": speedup(training.plan),
        "mean_freeze_ratio": training.plan.mean_freeze_ratio,
        "steps": training.step,
        "loss": curve[-1][1],
        "loss_at_equal_steps": same_steps,
        "curve": curve,
    }


def _first_weights(task: Task, seed: int) -> list[Stage]:
    if not task.pretrained:
        return stages(task.shape, seed)
    path = PRETRAINED / f"{task.pretrained.replace(' ', '_')}.pt"
    if not path.exists():
        pretrain(PRETRAINING[task.pretrained], path)
    network = nn.ModuleList(stages(task.shape, seed))
    network.load_state_dict(torch.load(path))
    return [stage for stage in network if isinstance(stage, Stage)]


def pretrain(task: Task, path: Path) -> None:
    """Train with nothing frozen, seed 0, and keep the weights."""
    training = Training(task, Way(), seed=0)
    rows = task.rows * MICROBATCHES
    data = task.data(rows * task.steps, seed=0)
    for step in range(task.steps):
        training.train_step(rows_of(data, range(step * rows, (step + 1) * rows)))
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}")
    torch.save(nn.ModuleList(training.stages).state_dict(), half)
    half.replace(path)
