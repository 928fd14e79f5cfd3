"""Train a ViT or a ConvNeXt on digits with DeepSpeed's pipeline engine. See README.md for how to start it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import data
import deepspeed
import torch
from costs import measure
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from models import BLOCKS, ConvNeXtConfig, ViTConfig, accuracy, loss_fn
from partition import BF16_STATE_BYTES, FP32_STATE_BYTES, HEURISTICS, CutPipeline, Stages, microbatches_in_flight
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Config = ViTConfig | ConvNeXtConfig


class Parser(argparse.ArgumentParser):
    """One line says what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments, with the model's config and the ds_config read."""
    parser = Parser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--model", choices=["vit", "convnext"], default="vit")
    parser.add_argument("--partition", choices=HEURISTICS, default="time", help="what the stages share evenly")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, help="of a token, or of the ConvNeXt's first level")
    parser.add_argument("--depths", type=int, nargs="+", help="blocks of the ViT, or of each level of the ConvNeXt")
    parser.add_argument("--seed", type=int, default=0)
    args = deepspeed.add_config_arguments(parser).parse_args(arguments)
    try:
        args.config = model_config(args.model, args.width, args.depths, args.seed)
        args.ds_config = read_ds_config(args.deepspeed_config)
        check_numbers(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def model_config(model: str, width: int | None, depths: list[int] | None, seed: int) -> Config:
    """Raises ValueError, one line, where the sizes do not fit each other."""
    if model == "vit" and depths and len(depths) > 1:
        raise ValueError(f"--depths has {len(depths)} numbers: a ViT has one")
    depth = {} if depths is None else {"depth": depths[0]} if model == "vit" else {"depths": tuple(depths)}
    sizes: dict[str, Any] = {**depth, **({} if width is None else {"width": width}), "seed": seed}
    return ViTConfig(**sizes) if model == "vit" else ConvNeXtConfig(**sizes)


def read_ds_config(path: str | None) -> dict[str, Any]:
    """Raises ValueError, one line, where the file or what the partition needs of it is not there."""
    if path is None or not Path(path).is_file():
        raise ValueError(f"--deepspeed_config {path}: no such file" if path else "--deepspeed_config is missing")
    try:
        config: dict[str, Any] = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if name not in config:
            raise ValueError(f'{path} has no "{name}": the partition depends on it')
    return config


def check_numbers(args: argparse.Namespace) -> None:
    layers, world = len(args.config.layers()), int(os.environ.get("WORLD_SIZE", 1))
    if not 1 <= args.stages <= layers:
        raise ValueError(f"--stages {args.stages}: the model's {layers} layers allow 1 to {layers}")
    if world % args.stages:
        raise ValueError(f"--stages {args.stages}: start a multiple of that many processes, not {world}")
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps} is not at least 1")


def prepare_device(local_rank: int) -> None:
    get_accelerator().set_device(local_rank)
    if get_accelerator().device_name() == "cpu":
        torch.set_num_threads(1)  # one rank, one core
        torch.set_flush_denormal(True)  # arithmetic on denormal numbers is many times slower


def measured_stages(config: Config, stages: int, ds_config: dict[str, Any], training: TensorDataset) -> Stages:
    """Measure every layer of the model on this rank's device, with one microbatch of the real data."""
    bf16 = ds_config.get("bf16", {}).get("enabled", False)
    device = torch.device(get_accelerator().current_device_name())
    layers = [spec.build().to(device, torch.bfloat16 if bf16 else torch.float32) for spec in config.layers()]
    images, labels = (part.to(device) for part in training[: ds_config["train_micro_batch_size_per_gpu"]])
    in_flight = microbatches_in_flight(
        stages,
        ds_config["gradient_accumulation_steps"],
        ds_config.get("timely_freeze", {}).get("schedule", "host"),
    )
    costs = measure(layers, images, labels, loss_fn)
    return Stages(costs, in_flight, BF16_STATE_BYTES if bf16 else FP32_STATE_BYTES)


def choose_partition(args: argparse.Namespace, training: TensorDataset) -> list[int]:
    """Rank 0 measures and decides for all: two measurements are never quite the same."""
    decided: list[list[int]] = [[]]
    if torch.distributed.get_rank() == 0:
        stages = measured_stages(args.config, args.stages, args.ds_config, training)
        decided[0] = stages.boundaries(args.partition)
        print(f"{args.model}, partition by {args.partition}:\n{stages.table(decided[0])}", flush=True)
    torch.distributed.broadcast_object_list(decided, src=0)
    return decided[0]


def loader(engine: PipelineEngine, dataset: TensorDataset, shuffle: bool) -> DataLoader:
    """This replica's share of the data, in microbatches."""
    sampler = DistributedSampler(
        dataset,
        num_replicas=engine.dp_world_size,
        rank=engine.grid.get_data_parallel_id(),
        shuffle=shuffle,
        drop_last=True,
    )
    return DataLoader(dataset, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, drop_last=True)


def epochs(batches: DataLoader) -> Iterator[Any]:
    """The data without end, in a new order each time."""
    for epoch in itertools.count():
        batches.sampler.set_epoch(epoch)
        yield from batches


def evaluate(engine: PipelineEngine, test: TensorDataset) -> float:
    """Share of the test images that get the right label; what fills no microbatch is left out.

    The engine averages what `loss_fn` says over microbatches and replicas.
    """
    batches = loader(engine, test, shuffle=False)
    engine.module.loss_fn = accuracy
    try:
        return float(engine.eval_batch(iter(batches), num_micro_batches=len(batches)))
    finally:
        engine.module.loss_fn = loss_fn


def main() -> None:
    args = parse_args()
    prepare_device(args.local_rank)
    deepspeed.init_distributed()
    training, test = data.load(size=args.config.image, seed=args.seed)

    boundaries = choose_partition(args, training)
    model = CutPipeline(args.config.layers(), boundaries, loss_fn=loss_fn, checkpointable_layers=BLOCKS)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=list(model.parameters()))

    batches = epochs(loader(engine, training, shuffle=True))
    for _ in range(args.steps):
        engine.train_batch(batches)  # DeepSpeed prints the training loss, every `steps_per_print` steps
    share = evaluate(engine, test)
    if engine.global_rank == 0:
        print(f"step {engine.global_steps}: test accuracy {share:.4f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
