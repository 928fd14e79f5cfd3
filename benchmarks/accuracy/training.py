"""One run of the accuracy study, on the ranks: two stages under torch.distributed.pipelining.

A freezing run has a twin beside it that the host trains alone. Every few steps both make one step in turn, which
tells how much faster freezing is whatever else the machine does; between them only the run itself goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.accuracy import tasks as accuracy_tasks
from benchmarks.accuracy.cells import BASELINE, Cell, Record, section
from benchmarks.accuracy.figures import clock
from benchmarks.accuracy.pipeline import STAGES, Pipeline
from benchmarks.accuracy.tasks import Data, Task
from tf_adapters.report.schema import Report
from tf_adapters.testing.paired import in_rotation

LONGEST = 2.5  # times the baseline's steps: where a run stops that gets nowhere
PROBE_SEED = 10_000  # apart from the seeds of the training batches


class Run:
    """One cell, trained until both its steps and the baseline's wall-clock time are through."""

    def __init__(self, cell: Cell, task: Task, output_dir: str) -> None:
        self.cell, self.task = cell, task
        self.data: Data = accuracy_tasks.load(task, cell.seed)
        self.trained = Pipeline(task, cell.schedule, cell.seed)
        self.next_batch = accuracy_tasks.batches(self.data.training, task.batch, cell.seed)
        self.probe_batch = accuracy_tasks.batches(self.data.training, task.batch, PROBE_SEED + cell.seed)
        self.adapter: Any = None
        self.twin: Pipeline | None = None
        if cell.method != BASELINE:
            from tf_adapters.torch_pipelining import attach

            self.twin = Pipeline(task, cell.schedule, cell.seed)
            settings = section(task, cell, output_dir)
            self.adapter = attach(self.trained.schedule, settings, optimizer=self.trained.optimizer)
        parameters = self.trained.module.named_parameters()
        self.sizes = {name: parameter.numel() for name, parameter in parameters if parameter.requires_grad}
        self.steps: list[tuple[str, float]] = []  # phase, and the share of this stage's elements that is frozen
        self.curve: list[list[float]] = []
        self.pairs: list[list[float]] = []
        self.probes: list[list[float]] = []
        self.frozen: Counter[str] = Counter()

    def train(self) -> Record:
        """All of it; what the ranks found."""
        self._evaluate()
        while not self._finished():
            if self.adapter is not None and len(self.steps) % self.task.probe_every == 0:
                self._probe()
            self._step()
            self.trained.average()
            if len(self.steps) % self.task.eval_every == 0:
                self._evaluate()
        return self._record()

    def _step(self) -> None:
        batch, number = self.next_batch(), len(self.steps)
        self._note_masks()
        if self.twin is None or number % self.task.pair_every:
            self.trained.step(batch)
            return
        twin = self.twin
        both = {"freezing": lambda: self.trained.step(batch), "alone": lambda: twin.step(batch)}
        times = in_rotation(both, number // self.task.pair_every)
        self.pairs.append([number + 1, times["alone"], times["freezing"]])

    def _masks(self) -> list[tuple[str, ...]]:
        """Return the masks of this stage in the next step, one for each microbatch."""
        controller = self.adapter.controller
        microbatches = range(self.task.microbatches)
        return [controller.frozen_parameters(controller.step, self.trained.stage, m) for m in microbatches]

    def _note_masks(self) -> None:
        """The coming step's phase and frozen share; after T_f also how often each tensor is frozen."""
        if self.adapter is None:
            self.steps.append(("", 0.0))
            return
        masks = self._masks()
        share = sum(self.sizes[name] for mask in masks for name in mask) / len(masks) / sum(self.sizes.values())
        self.steps.append((self.adapter.controller.phase.value, share))
        if len(self.steps) > self.task.settled_after:
            self.frozen.update(name for mask in masks for name in mask)

    def _probe(self) -> None:
        """Numerator and denominator of p_eff (paper, definition of the effective update probability) on this stage.

        The probability of a tensor's update is the share of the coming step's microbatches that do not freeze it.
        """
        energies = self.trained.energies(self.probe_batch(), self.probe_batch())
        masks = self._masks()
        frozen = Counter(name for mask in masks for name in mask)
        sums = [len(self.steps) + 1.0]
        for way in (0, 1):
            sums.append(sum(energy[way] * (1 - frozen[name] / len(masks)) for name, energy in energies.items()))
            sums.append(sum(energy[way] for energy in energies.values()))
        self.probes.append(sums)

    def _evaluate(self) -> None:
        self.curve.append([len(self.steps), *self.trained.evaluate(self.data.held_out)])

    def _finished(self) -> bool:
        """At the task's steps, and the time that the baseline takes for them; rank 0's clock decides."""
        done = len(self.steps)
        if done < self.task.steps or done % self.task.eval_every:
            return False
        if self.twin is None or done >= LONGEST * self.task.steps:
            return True
        elapsed = [clock([phase for phase, _ in self.steps], self.pairs)[-1]]
        dist.broadcast_object_list(elapsed, src=0)
        return elapsed[0] >= self.task.steps

    def _record(self) -> Record:
        """Everything measured, of all ranks; the report's own figures come from the report."""
        settled = max(0, len(self.steps) - self.task.settled_after) * self.task.microbatches
        mine = {
            "frozen_share": [share for _, share in self.steps],
            "probes": self.probes,
            "parameters": {name: self.frozen[name] / settled if settled else 0.0 for name in self.sizes},
        }
        ranks: list[Any] = [None] * STAGES
        dist.all_gather_object(ranks, mine)
        planned = None
        if self.adapter is not None:
            forecast = self.adapter.controller.forecast
            planned = forecast.ratio if forecast else None
            self._leave_report(ranks)
        return {
            "curve": self.curve,
            "pairs": self.pairs,
            "phases": _changes([phase for phase, _ in self.steps]),
            "steps": len(self.steps),
            "planned_step_ratio": planned,
            "stages": ranks,
        }

    def _leave_report(self, ranks: Sequence[Any]) -> None:
        """The run's report, with what its pictures need: ``tf-adapters show REPORT.json --plots FOLDER``."""
        path = self.adapter.controller.report_path
        self.adapter.detach()
        if dist.get_rank() or not path.exists():
            return
        update = {
            "frozen_share": {str(stage): of_rank["frozen_share"] for stage, of_rank in enumerate(ranks)},
            "parameter_freeze_ratio": {str(stage): of_rank["parameters"] for stage, of_rank in enumerate(ranks)},
        }
        Report.from_json({**Report.read(path).to_json(), **update}).write(path)


def _changes(phases: Sequence[str]) -> list[list[Any]]:
    """[first step, phase] of each phase."""
    return [[i + 1, phase] for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase]


def train_cell(cell: Cell, task: Task, output_dir: str) -> Record:
    """Called on all ranks at once."""
    torch.manual_seed(cell.seed)
    return Run(cell, task, output_dir).train()
