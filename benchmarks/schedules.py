"""The paper's study, small: schedules of torch.distributed.pipelining, each without and with freezing.

Two pipeline ranks on this machine's CPU, one thread each, the Llama of examples/torch_llama. Of each schedule both
trainings run in the same processes, step by step in turn, so that only ratios within one schedule are exact.
Prints the paper's columns and writes results/schedules.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "torch_llama")]

from measuring import machine

from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import Freezing, in_turn

LENGTHS = ("warmup", "monitoring", "stable")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")


@dataclass(frozen=True)
class Options(Freezing):
    """What to train."""

    schedule: str
    ranks: int = 2
    layers: int = 8
    width: int = 256
    heads: int = 4
    context: int = 64
    microbatches: int = 8
    micro_batch: int = 4

    @property
    def tokens(self) -> int:
        """In a batch."""
        return self.microbatches * self.micro_batch * self.context


@dataclass(frozen=True)
class Row:
    """One schedule. Ratios are of step times; freeze ratios are means over stages and microbatches in [0, 1]."""

    schedule: str
    tokens_per_second_alone: float
    stable_step_ratio: float
    planned_step_ratio: float
    mean_freeze_ratio: float

    @property
    def off(self) -> float:
        """How much longer the measured step is than the planned one, as a share of it."""
        return self.stable_step_ratio / self.planned_step_ratio - 1

    def cells(self) -> list[str]:
        throughput = self.tokens_per_second_alone
        return [
            self.schedule,
            f"{throughput:.0f}",
            f"{throughput / self.stable_step_ratio:.0f}",
            f"{1 / self.stable_step_ratio - 1:+.1%}",
            f"{1 / self.planned_step_ratio - 1:+.1%}",
            f"{self.off:+.1%}",
            f"{self.mean_freeze_ratio:.2f}",
        ]


HEADINGS = ["schedule", "tokens/s alone", "with freezing", "change", "planned", "measured/planned step", "freeze ratio"]


def main() -> None:
    args = parse_args()
    rows = []
    print(table([HEADINGS]), flush=True)
    for schedule in args.schedules:
        lengths = {name: getattr(args, name) for name in LENGTHS}
        options = Options(schedule, layers=args.layers, output_dir=f"runs/bench/schedules_{schedule}", **lengths)
        with RankPool(options.ranks, setup) as ranks:
            rows.append(ranks.run(measure, options, timeout_s=3600)[0])
        print(table([rows[-1].cells()]), flush=True)
    target = Path(__file__).with_name("results") / "schedules.json"
    record = {"machine": machine("torch"), "options": asdict(options), "rows": [asdict(row) for row in rows]}
    target.write_text(json.dumps(record, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, help="names of examples/torch_llama")
    parser.add_argument("--layers", type=int, default=8)
    for name in LENGTHS:
        parser.add_argument(f"--{name}", type=int, default=getattr(Freezing, name), help="steps")
    return parser.parse_args()


def table(rows: list[list[str]]) -> str:
    widths = [max(len(heading), 12) for heading in HEADINGS]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def setup() -> None:
    """Runs first in every rank."""
    import train

    train.join_ranks()


def measure(options: Options) -> Row:
    """Train with torch alone and with freezing, in turn. Called on all ranks at once."""
    from tf_adapters.torch_pipelining import attach

    alone, attached = build(options), build(options)
    adapter = attach(attached.schedule, options.section(), optimizer=attached.optimizers)
    assert adapter is not None
    controller = adapter.controller
    pairs = in_turn(
        training_step(alone, options),
        training_step(attached, options),
        phase_of=lambda: controller.phase.value,
        steps=options.steps,
    )
    plan, forecast = controller.state.plan, controller.forecast
    adapter.detach()
    assert plan is not None
    assert forecast is not None
    return Row(
        schedule=options.schedule,
        tokens_per_second_alone=options.tokens / statistics.median(pairs.alone["stable"]) * 1e3,
        stable_step_ratio=pairs.ratio("stable"),
        planned_step_ratio=forecast.ratio,
        mean_freeze_ratio=plan.mean_freeze_ratio,
    )


def build(options: Options) -> Any:
    """A trainer of the example on a fresh model, the same weights each time."""
    import models
    import torch
    from layout import Layout
    from pipeline import Trainer

    layout = Layout(options.schedule, options.ranks, options.layers, options.microbatches)
    config = models.new_config(options.layers, options.width, options.heads, options.context, vocabulary=256)
    return Trainer(layout, models.build(config), torch.device("cpu"), lr=1e-3, bf16=False)


def training_step(trainer: Any, options: Options) -> Callable[[], Any]:
    from data import Batches, encode
    from text import load_text, split

    windows = options.microbatches * options.micro_batch
    batches = Batches(encode(split(load_text("topics"))[0]), options.context, windows)
    return lambda: trainer.step(batches[trainer.finished_steps])


def held_out_loss(trainer: Any, options: Options) -> float:
    """The last stage's, told to all."""
    import torch.distributed as dist
    from data import Batches, encode
    from text import load_text, split

    windows = options.microbatches * options.micro_batch
    loss = trainer.evaluate(Batches(encode(split(load_text("topics"))[1]), options.context, windows))
    losses: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, None if loss is None else loss.item())
    return next(loss for loss in losses if loss is not None)


if __name__ == "__main__":
    main()
