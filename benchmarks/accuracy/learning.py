"""Effect of freeze plans on learning: `python -m benchmarks.accuracy.learning`.

MiniLM learns the accuracy study's text task from the same weights on the same batches, with freeze ratios for two
stages and 8 microbatches:

nothing: no freezing.
spread, few: three of four weight gradients skipped, of every microbatch, or of three microbatches in four all of them.
gpipe partial: the plan for equal stages, forwards of 1 and backwards of 2 of which half is weight gradients, r_max 0.8.
gpipe whole: the same step from less freezing, with half of stage 0's backwards frozen whole and the others not at all.
1f1b: the plan for equal stages.

No pipeline and no times: a process trains one network on one thread, and as many processes run as there are cores.
Needs the study's packages (docs/accuracy.md). Prints a table and writes results/accuracy/learning.json.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.accuracy.tasks import TASKS, batches, layers_of, load
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import result_file, write_json
from benchmarks.shared.measuring import aligned, machine
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.simulate.named_schedules import Sizes, named_order

TASK = replace(TASKS["text-one-pass"], steps=120, micro_batch=8)
STAGES, HELD_OUT, R_MAX = 2, 1024, 0.8
Ratios = Sequence[Sequence[float]]
"""Freeze ratios by stage and microbatch."""


@dataclass(frozen=True)
class Run:
    """One training's end: held-out loss and accuracy of the averaged weights."""

    way: str
    seed: int
    loss: float
    accuracy: float


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of them, from 0")
    parser.add_argument("--steps", type=int, default=TASK.steps)
    args = parser.parse_args()
    ways = all_ways()
    cells = [(way, ratios, seed, args.steps) for seed in range(args.seeds) for way, ratios in ways.items()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, initializer=prepare) as workers:
        runs: list[Run] = []
        for run in workers.map(train, *zip(*cells, strict=True)):
            runs.append(run)
            save(runs, ways, args.steps)
            print(
                f"{len(runs)}/{len(cells)} {run.way}, seed {run.seed}: {run.loss:.3f}, {run.accuracy:.1%}", flush=True
            )
    headings = ["freezing      ", "freeze ratio", "held-out loss", "accuracy", "losses by seed"]
    print(*headings, sep="  ")
    for way, ratios in ways.items():
        print(aligned(summary([run for run in runs if run.way == way], ratios), headings))


def save(runs: Sequence[Run], ways: dict[str, Ratios], steps: int) -> None:
    """The finished runs; written after each, so that a study that is cut off leaves what it has."""
    study = {"held_out": HELD_OUT, "steps": steps, "task": asdict(TASK), "ratios": ways}
    found = {"machine": machine("transformers"), "study": study, "runs": [asdict(run) for run in runs]}
    write_json(result_file("accuracy/learning.json"), found)


def summary(runs: Sequence[Run], ratios: Ratios) -> list[str]:
    losses, accuracy = [run.loss for run in runs], statistics.fmean(run.accuracy for run in runs)
    by_seed = " ".join(f"{loss:.3f}" for loss in losses)
    return [runs[0].way, f"{mean(ratios):.2f}", f"{statistics.fmean(losses):.3f}", f"{accuracy:.1%}", by_seed]


def mean(ratios: Ratios) -> float:
    return statistics.fmean(ratio for of_stage in ratios for ratio in of_stage)


def all_ways() -> dict[str, Ratios]:
    count = TASK.microbatches
    ways: dict[str, Ratios] = {
        "nothing": [[0.0] * count] * STAGES,
        "spread": [[0.75] * count] * STAGES,
        "few": [[float(m % 4 > 0) for m in range(count)]] * STAGES,
    }
    gpipe, one_f_one_b = (named_order(name, Sizes(count, STAGES)) for name in ("gpipe", "1f1b"))
    half = count // 2
    return {
        **ways,
        "gpipe partial": by_stage(plan(gpipe, times(gpipe), R_MAX)),
        "gpipe whole": [[0.0] * half + [1.0] * half, [0.75] * (count - 2) + [0.9, 1.0]],  # stage 1 as planned
        "1f1b": by_stage(plan(one_f_one_b, times(one_f_one_b), R_MAX)),
    }


def times(schedule: PipelineSchedule) -> dict[Action, Bounds]:
    return {action: Bounds(1.0, 2.0 if action.freezable else 1.0) for action in schedule.actions}


def by_stage(planned: FreezePlan) -> Ratios:
    ratios = sorted((action.stage, action.microbatch, ratio) for action, ratio in planned.freeze_ratio.items())
    return [[ratio for stage, _, ratio in ratios if stage == of] for of in range(STAGES)]


def prepare() -> None:
    """Runs first in every process."""
    import torch

    from benchmarks.accuracy.pipeline import setup

    torch.set_num_threads(1)
    setup()


def train(way: str, ratios: Ratios, seed: int, steps: int) -> Run:
    """One training in this process: warm-up without freezing, then a ramp to the ratios."""
    import torch

    from benchmarks.accuracy.pipeline import Chain, optimisation

    torch.manual_seed(seed)
    model = Chain(dict(enumerate(layers_of(TASK.name, seed))))
    optimizer, warmup, averaged = optimisation(TASK, model)
    data = load(TASK, seed)
    next_batch, freezing = batches(data.training, TASK.batch, seed), Freezing(model, ratios, seed)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        freezing.backward(step, *next_batch())
        optimizer.step()
        warmup.step()
        averaged.update_parameters(model)
    return Run(way, seed, *evaluate(averaged, data.held_out))


class Freezing:
    """The masks that training draws, on a network that is in one piece."""

    def __init__(self, model: Any, ratios: Ratios, seed: int) -> None:
        from tf_adapters.selection.masks import StageMasks
        from tf_adapters.testing.plans import tensor_units
        from tf_adapters.weight_gradients.parameters import ParameterMask

        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        stages: list[dict[str, Any]] = [{}, {}]
        for name, parameter in trained.items():
            stages[int(name.split(".")[1]) >= TASK.boundary][name] = parameter
        self._model, self._ratios = model, ratios
        self._mask = ParameterMask(trained)
        self._masks = StageMasks({stage: tensor_units(of_stage) for stage, of_stage in enumerate(stages)}, seed)

    def backward(self, step: int, samples: Any, labels: Any) -> None:
        """Gradients of a step, from 1, summed over its microbatches."""
        from torch.nn.functional import cross_entropy

        ramp = min(1.0, max(0.0, (step - TASK.warmup) / TASK.progressive))
        batch = zip(samples.split(TASK.micro_batch), labels.split(TASK.micro_batch), strict=True)
        drawn = [self._masks.draw(step, s, [ramp * r for r in ratios]) for s, ratios in enumerate(self._ratios)]
        for number, (some, their_labels) in enumerate(batch):
            with self._mask.frozen([name for masks in drawn for name in masks[number].names]):
                loss = cross_entropy(self._model(some), their_labels) / TASK.microbatches
                if loss.requires_grad:
                    loss.backward()


def evaluate(model: Any, data: Any) -> tuple[float, float]:
    """Held-out loss and accuracy."""
    import torch

    from benchmarks.accuracy.pipeline import score

    samples, labels = (part[:HELD_OUT] for part in data.tensors)
    with torch.no_grad():
        return score(torch.cat([model(part) for part in samples.split(64)]), labels)


if __name__ == "__main__":
    main()
