"""Pretrain a small GPT with Megatron-Core's pipeline. See README.md for how to start it.

What freezing adds is marked TimelyFreeze.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import device  # isort: split

import torch
from commandline import Parser, is_due, positive
from megatron.core import parallel_state
from model import Sizes
from text import TEXTS, ByteDataset, load_text, split
from trainer import Trainer

from tf_adapters.arguments import add_arguments, config_from_args
from tf_adapters.errors import TimelyFreezeError
from tf_adapters.megatron import attach

HELP = {
    "pipeline": "pipeline ranks",
    "virtual_pipeline": "model chunks of each pipeline rank; more than one interleaves them",
    "tensor": "ranks that share each layer",
    "microbatches": "of a batch",
    "micro_batch": "windows of text in a microbatch",
    "bf16": "bf16 with fp32 gradients and weights behind it",
    "distributed_optimizer": "shard the optimizer over replicas; its communication overlaps with the computing",
    "recompute": "less memory: every layer is recomputed in the backward",
    "tied": "share the token embedding with the output layer",
}


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Sizes):
        kind: dict[str, Any] = {"action": "store_true"} if field.default is False else {"type": int}
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, default=field.default, help=HELP.get(field.name), **kind)
    parser.add_argument("--steps", type=int, default=200, help="train until this step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lr-warmup", type=int, default=10, help="steps")
    parser.add_argument("--text", choices=sorted(TEXTS), default="topics")
    parser.add_argument("--log-every", type=positive, default=10, help="steps between lines")
    parser.add_argument("--eval-every", type=int, default=0, help="steps between held-out losses; 0: at the end")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: at the end")
    parser.add_argument("--save-dir", type=Path, help="write checkpoints here, as step_N")
    parser.add_argument("--load-dir", type=Path, help="resume from this checkpoint, a step_N of --save-dir")
    add_arguments(parser)  # TimelyFreeze: --timely-freeze and its settings
    args = parser.parse_args()
    try:
        args.freezing = config_from_args(args)  # TimelyFreeze: None without --timely-freeze
        args.sizes = sizes_of(args)
    except (ValueError, TimelyFreezeError) as error:
        parser.error(str(error))
    return args


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Raises ValueError, one line, where the sizes do not fit each other or the number of processes."""
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)})
    world = int(os.environ.get("WORLD_SIZE", 0))
    if world == 0 or world % sizes.ranks:
        raise ValueError(f"pipeline x tensor is {sizes.ranks}: start a multiple of that many processes with torchrun")
    return sizes


def main() -> None:
    args = parse_args()
    device.join_ranks()
    trainer = Trainer(args.sizes, args.lr, args.lr_warmup)
    saved = trainer.load(args.load_dir) if args.load_dir else {}
    adapter = None
    if args.freezing:  # TimelyFreeze: the rest follows from this call
        adapter = attach(
            trainer.chunks,
            trainer.optimizer,
            args.freezing,
            num_microbatches=args.microbatches,
            warmup_steps=max(0, args.lr_warmup - trainer.finished_steps),
        )
    if adapter and saved.get("freezing"):
        adapter.controller.load_state_dict(saved["freezing"])
    train(trainer, adapter, args)
    if adapter:
        adapter.detach()  # leaves the final report
    torch.distributed.destroy_process_group()


def train(trainer: Trainer, adapter: Any, args: argparse.Namespace) -> None:
    training, held_out = (ByteDataset(part, args.context, seed=args.seed) for part in split(load_text(args.text)))
    data = trainer.data(training, first_step=trainer.finished_steps)
    since = time.perf_counter()
    while trainer.finished_steps < args.steps:
        loss = trainer.step(data)
        step = trainer.finished_steps
        if step % args.log_every == 0:
            ms = (time.perf_counter() - since) * 1e3 / args.log_every
            say(step, "loss", loss, f", {ms:.0f} ms a step")
        if is_due(step, args.eval_every, args.steps):
            say(step, "held-out loss", trainer.evaluate(held_out))
        if args.save_dir and is_due(step, args.save_every, args.steps):
            state = adapter.controller.state_dict() if adapter else None
            trainer.save(args.save_dir / f"step_{step}", freezing=state)
        if step % args.log_every == 0:
            since = time.perf_counter()


def say(step: int, name: str, loss: torch.Tensor | None, more: str = "") -> None:
    """Print the mean over all replicas. Called on all ranks; those of the last pipeline stage have a loss."""
    if loss is None:
        return
    torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    mean = loss.item() / parallel_state.get_data_parallel_world_size()
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(f"step {step}: {name} {mean:.6f}{more}", flush=True)


if __name__ == "__main__":
    main()
