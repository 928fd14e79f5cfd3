"""Which lever pays: a small language model from scratch, at equal wall-clock and at equal steps.

One process trains the whole model; its layers stand for the stages of a pipeline of 4 ranks and 8 microbatches, 1F1B,
forwards of 1, input gradients of 1.2, weight gradients of 1. Freeze ratios, masks and draws are the planner's and the
adapters' own. **Step times are the plans', not measured**: a training whose plan makes a step 1.3x as fast takes 1.3x
as many steps in the same time. What drawing tokens costs is in them (``DRAWING`` of a weight gradient's time).

Writes results/language_model.jsonl beside this file, a line for each training (those that are there are not run
again), the table into docs/when.md, and results/language_model.png.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from measuring import put_table
from torch import nn

from tf_adapters.hosts.units import units_of
from tf_adapters.masking.gradient_noise import GradientNoise, RowObserver
from tf_adapters.masking.parameters import ParameterMask
from tf_adapters.masking.taps import StageTaps, plain_layer
from tf_adapters.masking.tokens import TokenSampler
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.frontier import best_point
from tf_adapters.planner.learning import Learning
from tf_adapters.planner.problem import PlanProblem, most_of_a_microbatch
from tf_adapters.planner.solve import solve
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.orders import one_forward_one_backward
from tf_adapters.selection.masks import Mask, StageMasks
from tf_adapters.timing.token_cost import TokenCost
from tf_adapters.training.step_masks import StepMasks

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from text import ByteDataset, load_text, split

RESULTS = Path(__file__).with_name("results") / "language_model.jsonl"
PICTURE = RESULTS.with_suffix(".png")
PAGE = ROOT / "docs" / "when.md"

STAGES, MICROBATCHES = 4, 8
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = 1.0, 1.2, 1.0
LAYERS, WIDTH, HEADS, CONTEXT, ROWS = 8, 96, 4, 48, 4
STEPS = 240
"""Of the host alone, in the time that all trainings have."""

LEARNING_RATE, WARMUP = 3e-3, 20
EVALUATIONS = 12
LOOK_EACH, PROBES = 20, (8, 12, 16)
"""Steps from one look at the noise of the gradients to the next, and the probes before it."""

DRAWING = TokenCost(fixed=0.1, per_token=1.0)
BASE = "nothing frozen"


@dataclass(frozen=True)
class Way:
    """How a training uses its time.

    Attributes:
        max_freeze_ratio: 0 freezes nothing.
        defer: weight gradients wait, with this many microbatches more in flight; None leaves them in place.
        target: the speed-up that is enough; None asks for the most.
        granularity, gradient_scale: the settings.
        microbatches: fewer of them for each step than 8.
        auto: ``max_freeze_ratio`` "auto": the plan that pays, by probes of the gradients' noise.
    """

    max_freeze_ratio: float = 0.0
    defer: int | None = None
    target: float | None = None
    granularity: str = "tensor"
    gradient_scale: str = "skipped_as_zero"
    microbatches: int = MICROBATCHES
    auto: bool = False

    @property
    def samples_tokens(self) -> bool:
        return self.granularity == "token"


WAYS = {
    BASE: Way(),
    "5 microbatches instead of 8": Way(microbatches=5),
    "tensors": Way(0.8),
    "tensors, computed mean": Way(0.8, gradient_scale="computed_mean"),
    "tokens": Way(0.8, granularity="token"),
    "tokens at 1.16x": Way(0.8, granularity="token", target=1.16),
    "deferred, exact": Way(defer=4),
    "deferred, tensors, computed mean": Way(0.8, defer=4, target=1.36, gradient_scale="computed_mean"),
    "deferred, tokens": Way(0.8, defer=4, target=1.36, granularity="token"),
    "deferred, tokens, the most": Way(0.8, defer=4, granularity="token"),
    "tensors, auto": Way(0.8, gradient_scale="computed_mean", auto=True),
    "deferred, tokens, auto": Way(0.8, defer=4, granularity="token", auto=True),
}


# --- plans ---------------------------------------------------------------------------------------------------


@cache
def planned(way: Way) -> FreezePlan:
    """The plan of a way; that of an auto way while it has not looked: nothing frozen."""
    return solve(_problem(replace(way, max_freeze_ratio=0.0) if way.auto else way))


def speedup(plan: FreezePlan) -> float:
    """How many times as fast as the host alone a step is."""
    return _batch(MICROBATCHES) / plan.makespan_ms.planned


def _problem(way: Way, learning: Learning | None = None) -> PlanProblem:
    schedule = one_forward_one_backward(STAGES, way.microbatches)
    backward = Bounds(INPUT_GRADIENT, INPUT_GRADIENT + WEIGHT_GRADIENT)
    return PlanProblem(
        schedule,
        {a: backward if a.freezable else Bounds(FORWARD, FORWARD) for a in schedule.actions},
        max_freeze_ratio=way.max_freeze_ratio,
        target_makespan_ms=_batch(MICROBATCHES) / way.target if way.target else 0.0,
        max_action_freeze_ratio=DRAWING.most_frozen if way.samples_tokens else 1.0,
        max_microbatch_freeze_ratio=most_of_a_microbatch(way.max_freeze_ratio),
        defer=way.defer is not None,
        extra_microbatches=way.defer or 0,
        learning=learning,
    )


def _batch(microbatches: int) -> float:
    return (microbatches + STAGES - 1) * (FORWARD + INPUT_GRADIENT + WEIGHT_GRADIENT)


# --- the model -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Stage(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == STAGES - 1
        if self.first:
            self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS // STAGES)))
        if self.last:
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tokens(x) + self.places.weight
        x = self.blocks(x)
        return self.head(self.norm(x)) if self.last else x


class Training:
    """One training of the whole model in this process, masked as the stages of a pipeline would be."""

    def __init__(self, way: Way, seed: int) -> None:
        torch.manual_seed(seed)
        self.way, self.seed, self.plan = way, seed, planned(way)
        self.elapsed, self.ratios = 0.0, list[float]()  # steps of the host alone; of each step so far
        self.stages = [Stage(index) for index in range(STAGES)]
        parameters = {index: dict(stage.named_parameters()) for index, stage in enumerate(self.stages)}
        self.masks = {index: ParameterMask(of_stage) for index, of_stage in parameters.items()}
        self.taps = {i: StageTaps(s, plain_layer) for i, s in enumerate(self.stages) if way.samples_tokens}
        self.draws = StageMasks({i: units_of(s) for i, s in enumerate(self.stages)}, seed, tokens=way.samples_tokens)
        self.noise = GradientNoise(
            {i: {n: named[n] for n in self.taps[i].names} if self.taps else named for i, named in parameters.items()}
        )
        self.looks_in_a_row = 0  # that found another plan better
        self.step = 0
        self.step_masks = StepMasks(self._draw, parameters, ties=())
        self.optimizer = torch.optim.AdamW(
            [p for of_stage in parameters.values() for p in of_stage.values()],
            lr=LEARNING_RATE,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        )

    def _draw(self, stage: int) -> Sequence[Mask]:
        frozen = 0.0 if self._probes() else 1.0
        ratios = [frozen * self.plan.ratio_of_microbatch[stage, m] for m in range(self.way.microbatches)]
        return self.draws.draw(self.step, stage, ratios)

    def _probes(self) -> bool:
        return self.way.auto and self.step % LOOK_EACH in PROBES

    def _look(self) -> None:
        """Choose the plan anew, as ``training.replanning`` does."""
        costs = dict.fromkeys(range(STAGES), DRAWING) if self.way.samples_tokens else {}
        learning = Learning.measured([self.noise.probes()], MICROBATCHES, costs, adaptive=True)
        assert learning is not None
        if self.plan.frontier:
            current = next(number for number, point in enumerate(self.plan.frontier) if point.chosen)
            other = best_point(self.plan.frontier, learning, current) != current
            self.looks_in_a_row = self.looks_in_a_row + 1 if other else 0
            if self.looks_in_a_row < 2:
                return
        self.looks_in_a_row = 0
        self.plan = solve(_problem(self.way, learning))

    def train_step(self, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.step += 1
        self.step_masks.clear()
        if self._probes():
            self.noise.begin()
        step_time = self._step_time()
        self.elapsed += step_time
        share = min(1.0, self.elapsed / STEPS)
        rate = LEARNING_RATE * min(1.0, self.step / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        for microbatch, (inputs, labels) in enumerate(zip(*(t.split(ROWS) for t in rows), strict=True)):
            self._microbatch(microbatch, inputs, labels)
        if self.way.gradient_scale == "computed_mean":
            for of_stage in self.step_masks.scales().values():
                for parameter, factor in of_stage:
                    assert parameter.grad is not None
                    parameter.grad.mul_(factor)
        self.optimizer.step()
        self.noise.end(MICROBATCHES)
        self.ratios.append(0.0 if self._probes() else self.plan.mean_freeze_ratio)
        if self.way.auto and self.step % LOOK_EACH == 0:
            self._look()

    def _step_time(self) -> float:
        """Of this step, in steps of the host alone: as many steps as fit best into its time."""
        plan = planned(self.way) if self._probes() else self.plan
        return 1.0 / speedup(plan) if self.way.auto else STEPS / round(STEPS * speedup(plan))

    @property
    def goes_on(self) -> bool:
        """Whether another step fits."""
        return self.elapsed + 0.5 * self._step_time() < STEPS

    def _microbatch(self, microbatch: int, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        x = inputs
        for index, stage in enumerate(self.stages):
            with self.masks[index].frozen(self.step_masks.of(index, microbatch).names):
                if index in self.taps:
                    with self.taps[index].recording(microbatch):
                        x = stage(x)
                else:
                    x = stage(x)
        (nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten()) / self.way.microbatches).backward()
        for index, taps in self.taps.items():
            taps.compute(microbatch, self._sampler(index, microbatch))

    def _sampler(self, stage: int, microbatch: int) -> TokenSampler | RowObserver | None:
        ratio = self.step_masks.of(stage, microbatch).share
        key = (self.seed, self.step, stage, microbatch)
        return TokenSampler(key, lambda _: DRAWING.kept(ratio)) if ratio else self.noise.observer(stage)

    @torch.no_grad()
    def loss(self, rows: tuple[torch.Tensor, torch.Tensor]) -> float:
        x, labels = rows
        for stage in self.stages:
            x = stage(x)
        return float(nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten()))


def train(name: str, seed: int) -> dict[str, Any]:
    """One training to the end of its time: losses by the share of the time."""
    torch.set_num_threads(1)
    training = Training(WAYS[name], seed)
    text, held_out = split(load_text("topics"))
    rows = ROWS * training.way.microbatches
    most_steps = 2 * STEPS if training.way.auto else round(STEPS * speedup(training.plan))
    data = ByteDataset(text, CONTEXT, windows=rows * most_steps, seed=seed)
    test = _rows(ByteDataset(held_out, CONTEXT, windows=512, seed=1), range(512))
    curve: list[tuple[float, float]] = []
    same_steps = None
    while training.goes_on:
        training.train_step(_rows(data, range(training.step * rows, (training.step + 1) * rows)))
        if training.step == STEPS:
            same_steps = training.loss(test)
        if training.elapsed + 0.5 * training._step_time() >= STEPS * (len(curve) + 1) / EVALUATIONS:
            curve.append(((len(curve) + 1) / EVALUATIONS, training.loss(test)))
    return {
        "way": name,
        "seed": seed,
        "speedup": training.step / STEPS if training.way.auto else speedup(training.plan),
        "mean_freeze_ratio": statistics.fmean(training.ratios),
        "steps": training.step,
        "loss": curve[-1][1],
        "loss_at_equal_steps": same_steps,
        "curve": curve,
    }


def _rows(data: ByteDataset, indices: range) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = zip(*(data[index] for index in indices), strict=True)
    return torch.stack(inputs), torch.stack(labels)


# --- all of them ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    there = {(row["way"], row["seed"]) for row in read()}
    cells = [(way, seed) for seed in range(args.seeds) for way in WAYS if (way, seed) not in there]
    if not args.table:
        with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
            for done in as_completed([pool.submit(train, *cell) for cell in cells]):
                with RESULTS.open("a") as file:
                    file.write(json.dumps(done.result()) + "\n")
                print({k: v for k, v in done.result().items() if k != "curve"}, flush=True)
    rows = by_way(read())
    put_table(PAGE, "language_model", table(rows))
    draw(rows)
    print(table(rows))


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def by_way(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    return {
        way: {row["seed"]: row for row in sorted(rows, key=lambda row: row["seed"]) if row["way"] == way}
        for way in WAYS
        if any(row["way"] == way for row in rows)
    }


def table(ways: Mapping[str, Mapping[int, dict[str, Any]]]) -> str:
    lines = [
        ["", "step, planned", "mean freeze ratio", "loss at equal wall-clock", "less than nothing frozen, paired"],
        ["---"] * 5,
    ]
    for way, runs in ways.items():
        one = next(iter(runs.values()))
        gains = [ways[BASE][seed]["loss"] - run["loss"] for seed, run in runs.items()]
        spread = f" ± {error(gains):.3f}" if len(gains) > 1 else ", one seed"
        gain = "" if way == BASE else f"{statistics.fmean(gains):+.3f}{spread}"
        loss = statistics.fmean(run["loss"] for run in runs.values())
        lines.append([way, f"{one['speedup']:.2f}x", f"{one['mean_freeze_ratio']:.2f}", f"{loss:.3f}", gain])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("|  |", "| |")


def error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def draw(ways: Mapping[str, Mapping[int, dict[str, Any]]]) -> None:
    """Held-out loss over wall-clock, means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for way, runs in ways.items():
        curves = [run["curve"] for run in runs.values()]
        times = [time for time, _ in curves[0]]
        means = [statistics.fmean(curve[index][1] for curve in curves) for index in range(len(times))]
        axes.plot(times, means, label=f"{way} ({means[-1]:.3f})", color="black" if way == BASE else None)
    axes.set(
        xlabel="wall-clock, as a share of the host's (step times planned)",
        ylabel="held-out loss",
        title=f"A language model from scratch, {STAGES} stages x {MICROBATCHES} microbatches, 1F1B",
        ylim=(None, axes.get_ylim()[0] + 0.35 * (axes.get_ylim()[1] - axes.get_ylim()[0])),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
