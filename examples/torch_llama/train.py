"""Train a Llama of Hugging Face transformers with torch.distributed.pipelining. See README.md for how to start it.

What freezing adds is marked TimelyFreeze.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkpoints
import models
import torch
import torch.distributed as dist
from commandline import Parser, is_due, positive
from data import BYTES, Batches, encode, tokenizer_in
from layout import CLASSES, Layout
from pipeline import Trainer
from text import TEXTS, load_text, split

from tf_adapters.arguments import add_arguments, config_from_args
from tf_adapters.errors import TimelyFreezeError
from tf_adapters.torch_pipelining import attach

SIZES = {"layers": 8, "width": 256, "heads": 4}
"""Of a new model; a checkpoint has its own."""


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=CLASSES, default="1f1b")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=positive, help=f"of a new model (default: {default})")
    parser.add_argument("--checkpoint", type=Path, help="train the model in this folder, in Hugging Face's format")
    parser.add_argument("--text", choices=sorted(TEXTS), default="topics")
    parser.add_argument("--context", type=positive, default=64, help="tokens of a window")
    parser.add_argument("--microbatches", type=positive, default=8, help="of a batch")
    parser.add_argument("--micro-batch", type=positive, default=4, help="windows of text in a microbatch")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16 (autocast); weights stay fp32")
    parser.add_argument("--steps", type=positive, default=200, help="train until this step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-norm", type=float, help="clip gradients by their norm over all stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=positive, default=10, help="steps between lines")
    parser.add_argument("--eval-every", type=int, default=0, help="steps between held-out losses; 0: at the end")
    parser.add_argument("--save", type=Path, help="write the trained model here, in Hugging Face's format")
    parser.add_argument("--save-state", type=Path, help="write what resuming needs here, as step_N")
    parser.add_argument("--save-every", type=int, default=0, help="steps between --save-state; 0: at the end")
    parser.add_argument("--resume", type=Path, help="go on from here, a step_N of --save-state")
    add_arguments(parser)  # TimelyFreeze: --timely-freeze and its settings
    args = parser.parse_args(arguments)
    try:
        args.freezing = config_from_args(args)  # TimelyFreeze: None without --timely-freeze
        args.config = model_config(args)
        args.layout = Layout(args.schedule, world_size(), args.config.num_hidden_layers, args.microbatches)
    except (ValueError, TimelyFreezeError) as error:
        parser.error(str(error))
    return args


def model_config(args: argparse.Namespace) -> Any:
    """Raises ValueError, one line, where sizes are wrong or given twice."""
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name)}
    if args.checkpoint is None:
        return models.new_config(**{**SIZES, **given}, context=args.context, vocabulary=BYTES)
    if given:
        name = next(iter(given))
        raise ValueError(f"--{name} is given, but the model in --checkpoint has sizes of its own: leave it out")
    return models.config_in(args.checkpoint)


def world_size() -> int:
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("start it with torchrun, as README.md does")
    return int(os.environ["WORLD_SIZE"])


def join_ranks() -> torch.device:
    """Join the ranks that torchrun started; this one's device: a GPU, or one CPU core."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(1)  # one rank, one core
    torch.set_flush_denormal(True)  # arithmetic on denormal numbers is many times slower
    dist.init_process_group("gloo")
    return torch.device("cpu")


def run(args: argparse.Namespace, device: torch.device) -> None:
    tokenizer = tokenizer_in(args.checkpoint)
    training, held_out = data(args, tokenizer)
    whole = models.build(args.config, args.checkpoint, args.seed)
    trainer = Trainer(args.layout, whole, device, args.lr, args.bf16)
    trainer.max_norm = args.max_norm
    del whole  # what the stages do not share of it
    freezing = None
    if args.freezing:  # TimelyFreeze: the rest follows from this call
        freezing = attach(trainer.schedule, args.freezing, optimizer=trainer.optimizers)
    if args.resume:
        checkpoints.load(args.resume, trainer, freezing)
    train(trainer, training, held_out, args, freezing)
    if freezing:
        freezing.detach()  # TimelyFreeze: leaves the final report
    if args.save:
        models.save(args.config, trainer.stages.values(), args.save, tokenizer)


def data(args: argparse.Namespace, tokenizer: Any) -> tuple[Batches, Batches]:
    """Training and held-out batches. SystemExit, one line, where the model does not know the text's tokens."""
    parts = [encode(part, tokenizer) for part in split(load_text(args.text))]
    highest = max(int(part.max()) for part in parts)
    if highest >= args.config.vocab_size:
        raise SystemExit(f"the text has token {highest}, but the model's vocabulary is {args.config.vocab_size}")
    windows = args.microbatches * args.micro_batch
    training, held_out = (Batches(part, args.context, windows, args.seed) for part in parts)
    return training, held_out


def train(trainer: Trainer, training: Batches, held_out: Batches, args: argparse.Namespace, freezing: Any) -> None:
    since = time.perf_counter()
    while trainer.finished_steps < args.steps:
        loss = trainer.step(training[trainer.finished_steps])
        step = trainer.finished_steps
        logged = step % args.log_every == 0
        if logged and loss is not None:
            value = loss.item()  # waits for the device
            ms = (time.perf_counter() - since) * 1e3 / args.log_every
            print(f"step {step}: loss {value:.6f}, {ms:.0f} ms a step", flush=True)
        if is_due(step, args.eval_every, args.steps):
            evaluated = trainer.evaluate(held_out)
            if evaluated is not None:
                print(f"step {step}: held-out loss {evaluated.item():.6f}", flush=True)
        if args.save_state and is_due(step, args.save_every, args.steps):
            checkpoints.save(args.save_state / f"step_{step}", trainer, freezing)
        if logged:
            since = time.perf_counter()


def main() -> None:
    args = parse_args()
    run(args, join_ranks())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
