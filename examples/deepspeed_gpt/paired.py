"""Train the example twice in the same processes, step by step in turn: with DeepSpeed alone, and with freezing.

Whatever slows the machine down slows both, so the ratio of each pair of steps is worth more than any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parents[2] / "deepspeed_configs"


@dataclass(frozen=True)
class Options:
    """What to train, and for how many steps in each phase."""

    config: str = "plain"
    stages: int = 2
    width: int = 256
    blocks: int = 8
    context: int = 64
    microbatches: int = 8
    max_freeze_ratio: float = 0.8
    warmup: int = 10
    monitoring: int = 30
    progressive: int = 20
    stable: int = 30
    output_dir: str = "runs/demo"

    @property
    def steps(self) -> int:
        return self.warmup + self.monitoring + self.progressive + self.stable

    def ds_config(self) -> dict[str, Any]:
        """The ready config, its steps and its `timely_freeze` section as the options say."""
        config = json.loads((CONFIGS / f"{self.config}.json").read_text())
        section = config["timely_freeze"] | {
            "max_freeze_ratio": self.max_freeze_ratio,
            "warmup_steps": self.warmup,
            "monitoring_steps": self.monitoring,
            "progressive_steps": self.progressive,
            "report_every": 10,
            "on_error": "raise",
            "output_dir": self.output_dir,
        }
        sizes = {"gradient_accumulation_steps": self.microbatches, "steps_per_print": 10**9}
        return config | sizes | {"timely_freeze": section}


@dataclass
class Pairs:
    """Times in ms of steps that ran in turn; one list for each phase."""

    alone: dict[str, list[float]] = field(default_factory=dict)
    attached: dict[str, list[float]] = field(default_factory=dict)

    def add(self, phase: str, alone: float, attached: float) -> None:
        self.alone.setdefault(phase, []).append(alone)
        self.attached.setdefault(phase, []).append(attached)

    def ratio(self, phase: str) -> float:
        """Median over pairs of attached / alone."""
        pairs = zip(self.attached[phase], self.alone[phase], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


@dataclass
class Outcome:
    """What rank 0 found out."""

    pairs: Pairs
    held_out_alone: float
    held_out_attached: float
    planned_ratio: float
    mask_ms: float
    report: str


def setup() -> None:
    """Join the ranks; DeepSpeed's own start-up lines stay out of the way."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with _quiet():
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)


def run(options: Options) -> Outcome:
    """Train both engines on this rank. Called on all ranks at once."""
    alone, _ = build_engine(options, freezing=False)
    attached, adapter = build_engine(options, freezing=True)
    controller = adapter.controller
    streams = {id(engine): training_data(engine, options) for engine in (alone, attached)}
    pairs = Pairs()
    for step in range(options.steps):
        phase = controller.phase.value
        order = (alone, attached) if step % 2 else (attached, alone)
        took = {id(engine): timed_step(engine, streams[id(engine)]) for engine in order}
        pairs.add(phase, took[id(alone)], took[id(attached)])
    mask_ms = time_masks(controller, attached.stage_id)
    adapter.detach()
    assert controller.forecast is not None
    return Outcome(
        pairs,
        held_out_loss(alone, options),
        held_out_loss(attached, options),
        controller.forecast.ratio,
        mask_ms,
        str(controller.report_path),
    )


def run_without_freezing(options: Options) -> Pairs:
    """One engine, in turn detached and attached but not freezing. Called on all ranks at once."""
    import logging

    import tf_adapters.deepspeed

    logging.getLogger("tf_adapters").setLevel(logging.WARNING)  # it would say "enabled" at every pair
    engine, adapter = build_engine(options, freezing=True)
    data = training_data(engine, options)
    pairs = Pairs()
    for step in range(options.warmup):
        attached = timed_step(engine, data) if step % 2 else None
        adapter.detach()
        alone = timed_step(engine, data)
        adapter = tf_adapters.deepspeed.attach(engine)
        pairs.add("warmup", alone, attached if attached is not None else timed_step(engine, data))
    return pairs


def build_engine(options: Options, freezing: bool) -> tuple[Any, Any]:
    """A DeepSpeed engine on a fresh copy of the model, the same weights each time, and its adapter if it has one."""
    import deepspeed
    from model import GPTConfig, build_pipeline

    import tf_adapters.deepspeed

    config = options.ds_config()
    if not freezing:
        section = config.pop("timely_freeze")
        if section.get("schedule"):  # a schedule of ours, without freezing
            config["timely_freeze"] = {"schedule": section["schedule"], "method": "none", "warmup_steps": 10**9}
    shape = GPTConfig(context=options.context, width=options.width, blocks=options.blocks)
    with _quiet():
        model = build_pipeline(shape, num_stages=options.stages)
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        if not freezing:
            tf_adapters.deepspeed.attach(engine)
    return engine, tf_adapters.deepspeed.attach(engine) if freezing else None


def training_data(engine: Any, options: Options) -> Iterator[Any]:
    from data import ByteDataset, load_text, split
    from train import microbatches

    return microbatches(engine, ByteDataset(split(load_text("topics"))[0], options.context))


def held_out_loss(engine: Any, options: Options) -> float:
    from data import ByteDataset, load_text, split
    from train import microbatches

    held_out = ByteDataset(split(load_text("topics"))[1], options.context)
    return float(engine.eval_batch(microbatches(engine, held_out), num_micro_batches=32))


def timed_step(engine: Any, data: Iterator[Any]) -> float:
    """One training batch, from all ranks ready to all ranks done; ms."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    engine.train_batch(data)
    dist.barrier()
    return (time.perf_counter() - start) * 1e3


def time_masks(controller: Any, stage: int, steps: int = 50) -> float:
    """Drawing one step's masks on this rank and switching them on and off for every forward and backward; ms."""
    microbatches = range(controller.schedule.num_microbatches)
    start = time.perf_counter()
    for step in range(controller.step, controller.step + steps):
        for microbatch in microbatches:
            names = controller.frozen_parameters(step, stage, microbatch)
            for _ in ("forward", "backward"):
                with controller.parameter_masks[stage].frozen(names):
                    pass
    return (time.perf_counter() - start) * 1e3 / steps


_SINK = open(os.devnull, "w")  # noqa: SIM115  the host's loggers may keep it


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(_SINK), contextlib.redirect_stderr(_SINK):
        yield
