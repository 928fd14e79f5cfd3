"""What freezing gains and costs in Megatron-Core's pipeline schedules: `make bench`.

Two pipeline ranks on this machine's CPU, one thread each. Times are ratios of steps that ran in turn in the same
processes; memory is the peak above an idle process, in processes of its own. Writes JSON beside this file.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "megatron_gpt")]

from measuring import MODES, Result, for_memory, peak_above_idle, peak_memory, publish
from text import ByteDataset, load_text, split

from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import Freezing, Outcome, Pairs, Step, compare, on_and_off

HOST = "megatron-core"
VIRTUAL_PIPELINE = {"1f1b": 1, "interleaved": 2}
NOT_FREEZING_PAIRS = 60


@dataclass(frozen=True)
class Options(Freezing):
    """What to train."""

    config: str = "1f1b"
    pipeline: int = 2
    layers: int = 8
    hidden: int = 256
    context: int = 64
    microbatches: int = 8
    micro_batch: int = 4


def main() -> None:
    args = parse_args()
    for config in args.configs:
        options = Options(
            config=config,
            warmup=args.warmup,
            monitoring=args.monitoring,
            stable=args.stable,
            micro_batch=args.micro_batch,
            max_freeze_ratio=args.max_freeze_ratio,
            output_dir=f"runs/bench/megatron_{config}",
        )
        if args.not_freezing_only:
            print(f"{config}: step attached, not freezing / alone  {not_freezing_ratio(options, args.pairs):.3f}")
        else:
            publish(f"megatron_speed_{config}", HOST, options, measure(options, args.pairs))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", choices=VIRTUAL_PIPELINE, default=list(VIRTUAL_PIPELINE))
    parser.add_argument("--max-freeze-ratio", type=float, default=0.8)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--monitoring", type=int, default=60)
    parser.add_argument("--stable", type=int, default=40, help="pairs of steps in stable freezing")
    parser.add_argument("--pairs", type=int, default=NOT_FREEZING_PAIRS, help="pairs of steps that do not freeze")
    parser.add_argument("--not-freezing-only", action="store_true", help="only what an idle adapter costs; no JSON")
    return parser.parse_args()


def measure(options: Options, not_freezing_pairs: int) -> Result:
    with RankPool(options.pipeline, setup) as ranks:
        outcome = ranks.run(run, options, timeout_s=3600)[0]
    not_freezing = not_freezing_ratio(options, not_freezing_pairs)
    peaks = {mode: peak_memory(options.pipeline, setup, peak_of_rank, options, mode) for mode in MODES}
    return Result.of(options.config, outcome, not_freezing, peaks)


def not_freezing_ratio(options: Options, pairs: int) -> float:
    """Step time attached but not freezing, over that of Megatron alone."""
    with RankPool(options.pipeline, setup) as ranks:
        return ranks.run(run_without_freezing, options, pairs, timeout_s=3600)[0].ratio("off")


def setup() -> None:
    """Runs first in every rank."""
    import device

    device.join_ranks()


def run(options: Options) -> Outcome:
    """Train with Megatron alone and with freezing, in turn. Called on all ranks at once."""
    alone, _ = build(options, freezing=False)
    attached, adapter = build(options, freezing=True)
    return compare(
        training_step(alone, options),
        training_step(attached, options),
        adapter,
        options.steps,
        lambda: (held_out_loss(alone, options), held_out_loss(attached, options)),
    )


def run_without_freezing(options: Options, pairs: int) -> Pairs:
    """One training, in turn attached but not freezing, and with every patch taken back. Called on all ranks at once."""
    import logging

    import tf_adapters.megatron
    from tf_adapters.megatron.adapter import ATTRIBUTE

    logging.getLogger("tf_adapters").setLevel(logging.WARNING)  # it would say "enabled" at every pair
    trainer, _ = build(replace(options, warmup=10**6), freezing=True)

    def detach() -> None:
        getattr(trainer.chunks[0], ATTRIBUTE).detach()
        tf_adapters.megatron.revert()

    return on_and_off(
        training_step(trainer, options),
        attach=lambda: attach(trainer, replace(options, warmup=10**6)),
        detach=detach,
        phase="off",
        pairs=pairs,
    )


def build(options: Options, freezing: bool) -> tuple[Any, Any]:
    """A trainer of the example on a fresh model, the same weights each time, and its adapter if it has one."""
    from model import Sizes
    from trainer import Trainer

    sizes = Sizes(
        pipeline=options.pipeline,
        virtual_pipeline=VIRTUAL_PIPELINE[options.config],
        layers=options.layers,
        hidden=options.hidden,
        context=options.context,
        microbatches=options.microbatches,
        micro_batch=options.micro_batch,
    )
    trainer = Trainer(sizes)
    return trainer, attach(trainer, options) if freezing else None


def attach(trainer: Any, options: Options) -> Any:
    import tf_adapters.megatron

    return tf_adapters.megatron.attach(
        trainer.chunks, trainer.optimizer, options.section(), num_microbatches=options.microbatches
    )


def training_step(trainer: Any, options: Options) -> Step:
    text = ByteDataset(split(load_text("topics"))[0], options.context)
    return partial(trainer.step, trainer.data(text))


def held_out_loss(trainer: Any, options: Options) -> float:
    """The last pipeline stage's, told to all."""
    import torch.distributed as dist

    loss = [trainer.evaluate(ByteDataset(split(load_text("topics"))[1], options.context))]
    dist.broadcast_object_list(loss, src=dist.get_world_size() - 1)
    return float(loss[0])


def peak_of_rank(options: Options, mode: str) -> int:
    import tf_adapters.megatron.adapter  # noqa: F401

    short = for_memory(options, mode)

    def step() -> Step:
        return training_step(build(short, freezing=mode != "alone")[0], short)

    return peak_above_idle(step, settle=short.monitoring + 6)


if __name__ == "__main__":
    main()
