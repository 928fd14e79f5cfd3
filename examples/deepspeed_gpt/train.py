"""Train a small GPT with DeepSpeed's pipeline engine. See README.md for how to start it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import RepeatingLoader
from model import GPTConfig, build_pipeline
from text import TEXTS, ByteDataset, load_text, split
from torch.utils.data import DataLoader, DistributedSampler

EVAL_MICROBATCHES = 32


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--steps", type=int, default=200, help="train until this step")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tied", action="store_true", help="share the token embedding with the output layer")
    parser.add_argument("--text", choices=sorted(TEXTS), default="topics")
    parser.add_argument("--eval-every", type=int, default=0, help="steps between held-out losses; 0: at the end")
    parser.add_argument("--save-dir", help="save a checkpoint here at the end")
    parser.add_argument("--load-dir", help="resume from the latest checkpoint here")
    return deepspeed.add_config_arguments(parser).parse_args()


def prepare_device(local_rank: int) -> None:
    get_accelerator().set_device(local_rank)
    if get_accelerator().device_name() == "cpu":
        torch.set_num_threads(1)  # one rank, one core
        torch.set_flush_denormal(True)  # arithmetic on denormal numbers is many times slower


def microbatches(engine: PipelineEngine, dataset: ByteDataset, first_step: int = 0) -> Iterator[Any]:
    """This replica's endless share of the data, from the microbatch at which `first_step` begins."""
    sampler = DistributedSampler(
        dataset,
        num_replicas=engine.dp_world_size,
        rank=engine.grid.get_data_parallel_id(),
        shuffle=False,
    )
    loader = DataLoader(
        dataset,
        batch_size=engine.train_micro_batch_size_per_gpu(),
        sampler=sampler,
        drop_last=True,
    )
    return islice(RepeatingLoader(loader), first_step * engine.gradient_accumulation_steps(), None)


def evaluate(engine: PipelineEngine, held_out: ByteDataset) -> None:
    batches = microbatches(engine, held_out)
    loss = engine.eval_batch(batches, num_micro_batches=EVAL_MICROBATCHES).item()
    if engine.global_rank == 0:
        print(f"step {engine.global_steps}: held-out loss {loss:.4f}", flush=True)


def train(engine: PipelineEngine, args: argparse.Namespace) -> None:
    """DeepSpeed itself prints the training loss, every `steps_per_print` steps."""
    train_text, held_out_text = split(load_text(args.text))
    held_out = ByteDataset(held_out_text, args.context, seed=args.seed)
    training = ByteDataset(train_text, args.context, seed=args.seed)
    batches = microbatches(engine, training, first_step=engine.global_steps)

    while engine.global_steps < args.steps:
        engine.train_batch(batches)
        if args.eval_every and engine.global_steps % args.eval_every == 0:
            evaluate(engine, held_out)
    if not args.eval_every or engine.global_steps % args.eval_every:
        evaluate(engine, held_out)


def main() -> None:
    args = parse_args()
    prepare_device(args.local_rank)
    deepspeed.init_distributed()

    config = GPTConfig(context=args.context, width=args.width, blocks=args.blocks, seed=args.seed)
    model = build_pipeline(config, num_stages=args.stages, tied=args.tied)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=list(model.parameters()))
    if args.load_dir:
        path, _ = engine.load_checkpoint(args.load_dir)
        if path is None:
            raise SystemExit(f"no checkpoint in {args.load_dir}")

    train(engine, args)

    if args.save_dir:
        engine.save_checkpoint(args.save_dir)
    # DeepSpeed keeps groups alive until Python ends. A gloo thread that frees a tensor then would abort the process.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
