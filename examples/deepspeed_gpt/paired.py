"""Train the example in processes of a pool: with DeepSpeed alone, with tf-adapters, or both step by step in turn."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from text import ByteDataset, load_text, split

from tf_adapters.testing.paired import Outcome, PairedSettings, Pairs, Step, compare, on_and_off

CONFIGS = Path(__file__).resolve().parents[2] / "deepspeed_configs"


@dataclass(frozen=True, kw_only=True)
class Options(PairedSettings):
    """What to train, and for how many steps in each phase."""

    config: str = "plain"
    stages: int = 2
    width: int = 256
    blocks: int = 8
    context: int = 64
    microbatches: int = 8
    gradient_clipping: float | None = None
    monitoring: int = 30
    progressive: int = 20
    stable: int = 30
    output_dir: str = "runs/demo"

    def ds_config(self) -> dict[str, Any]:
        """The ready config, its steps and its `timely_freeze` section as the options say."""
        config = json.loads((CONFIGS / f"{self.config}.json").read_text())
        sizes: dict[str, float] = {"gradient_accumulation_steps": self.microbatches, "steps_per_print": 10**9}
        if self.gradient_clipping is not None:
            sizes["gradient_clipping"] = self.gradient_clipping
        section = {name: value for name, value in config["timely_freeze"].items() if name != "goal"}
        return config | sizes | {"timely_freeze": section | self.section()}


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
    return compare(
        training_step(alone, options),
        training_step(attached, options),
        adapter,
        options.steps,
        lambda: (held_out_loss(alone, options), held_out_loss(attached, options)),
    )


@dataclass(frozen=True)
class Trained:
    """One training: the median of its last steps in ms, its held-out loss, and its report if we were attached."""

    step_ms: float
    held_out_loss: float
    report: str | None = None


def train(options: Options, freezing: bool) -> Trained:
    """Train one engine on this rank, without a barrier between steps. Called on all ranks at once."""
    engine, adapter = build_engine(options, freezing)
    step = training_step(engine, options)
    steps_ms = []
    for _ in range(options.steps):
        start_s = time.perf_counter()
        step()
        steps_ms.append((time.perf_counter() - start_s) * 1e3)
    report = None
    if adapter is not None:
        report = str(adapter.controller.report_path)
        adapter.detach()
    return Trained(statistics.median(steps_ms[-options.stable :]), held_out_loss(engine, options), report)


def run_without_freezing(options: Options) -> Pairs:
    """One engine, in turn detached and attached but not freezing. Called on all ranks at once."""
    import tf_adapters.deepspeed

    logging.getLogger("tf_adapters").setLevel(logging.WARNING)  # it would say "enabled" at every pair
    engine, _ = build_engine(options, freezing=True)
    return on_and_off(
        training_step(engine, options),
        attach=lambda: tf_adapters.deepspeed.attach(engine),
        detach=lambda: engine.timely_freeze.detach(),
        phase="warmup",
        pairs=options.warmup,
    )


def build_engine(options: Options, freezing: bool) -> tuple[Any, Any]:
    """A DeepSpeed engine on a fresh copy of the model, the same weights each time, and its adapter if it has one."""
    import deepspeed
    from model import GPTConfig, build_pipeline

    import tf_adapters.deepspeed

    config = options.ds_config()
    if not freezing:
        section = config.pop("timely_freeze")
        if section.get("schedule"):  # a schedule of ours, without freezing
            config["timely_freeze"] = {"schedule": section["schedule"], "method": "none", "max_freeze_ratio": 0.0}
    shape = GPTConfig(context=options.context, width=options.width, blocks=options.blocks)
    with _quiet():
        model = build_pipeline(shape, num_stages=options.stages)
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        if not freezing:
            tf_adapters.deepspeed.attach(engine)
    return engine, tf_adapters.deepspeed.attach(engine) if freezing else None


def training_step(engine: Any, options: Options) -> Step:
    return partial(engine.train_batch, training_data(engine, options))


def training_data(engine: Any, options: Options) -> Iterator[Any]:
    from train import microbatches

    return microbatches(engine, ByteDataset(split(load_text("topics"))[0], options.context))


def held_out_loss(engine: Any, options: Options) -> float:
    from train import microbatches

    held_out = ByteDataset(split(load_text("topics"))[1], options.context)
    return float(engine.eval_batch(microbatches(engine, held_out), num_micro_batches=32))


_SINK = open(os.devnull, "w")  # noqa: SIM115  the host's loggers may keep it


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show nothing of what the host says, nor of what its linker says when it looks for libraries (``-laio``)."""
    shown = os.dup(2)
    os.dup2(_SINK.fileno(), 2)
    try:
        with contextlib.redirect_stdout(_SINK), contextlib.redirect_stderr(_SINK):
            yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)
