"""DeepSpeed with one stage and ZeRO 1: memory around the optimizer's step when nearly everything is held."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.parts import Check, Options, Part, no_package, section
from benchmarks.gpu.pipeline import LLAMA_1B, TINY, Layer, Size, mean_square, smaller
from tf_adapters.testing import force_plan

RATIO = 0.95  # of 2 microbatches: what both freeze is held
STEPS = 4


class Allocated(TorchDispatchMode):
    """Count on a CPU the bytes of all new tensors except views. This is more than the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if torch.is_tensor(a)}
        if torch.is_tensor(result) and result.untyped_storage().data_ptr() not in known:
            self.bytes += result.untyped_storage().nbytes()
        return result


@contextmanager
def measured(options: Options, peaks: list[int]) -> Iterator[None]:
    """Append the peak bytes that the block allocates to ``peaks``."""
    if not options.cuda:
        with Allocated() as allocated:
            yield
        peaks.append(allocated.bytes)
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    peaks.append(torch.cuda.max_memory_allocated() - before)


def run(options: Options) -> list[Check]:
    """Run the host alone, then with nearly all parameters held."""
    size = replace(TINY if options.tiny else smaller(LLAMA_1B, 4), microbatches=2)
    alone, parameters, _ = peak_of_step(options, size, freezing=False)
    attached, _, held = peak_of_step(options, size, freezing=True)
    extra = 100 * (attached - alone) / (4 * parameters)
    return [
        Check("peak in the step, host alone", alone / 2**20, "MiB"),
        Check("peak in the step, attached", attached / 2**20, "MiB"),
        Check("more than alone", extra, "% of the fp32 partition", most=1.0),
        Check("share of the parameters that is held", held, least=0.5),
    ]


def peak_of_step(options: Options, size: Size, freezing: bool) -> tuple[int, int, float]:
    """Return the least of the later steps' peaks, the number of parameters, and the share of them that was held."""
    engine, adapter = build(options, size, freezing)
    peaks: list[int] = []
    held: list[float] = []
    parameters = sum(p.numel() for p in engine.module.parameters())
    instruction = next(kind for kind in engine._INSTRUCTION_MAP if kind.__name__ == "OptimizerStep")

    def watched(run: Callable[..., Any], of_engine: Any, *args: Any, **kwargs: Any) -> Any:
        if adapter is not None:
            held.append(sum(p.numel() for p in adapter.controller.held_parameters()) / parameters)
        with measured(options, peaks):
            return run(of_engine, *args, **kwargs)

    instructions = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = {**instructions, instruction: partial(watched, instructions[instruction])}
    data = batches(options, size)
    for _ in range(STEPS):
        engine.train_batch(data)
    engine._INSTRUCTION_MAP = instructions
    if adapter is not None:
        adapter.detach()
    engine.destroy()
    return min(peaks[1:]), parameters, min(held[1:], default=0.0)


def batches(options: Options, size: Size) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same microbatch forever."""
    shape = (size.rows, size.context, size.width)
    dtype = torch.bfloat16 if options.cuda else torch.float32
    inputs, target = (torch.randn(shape, dtype=dtype, device=options.target()) for _ in range(2))
    while True:
        yield inputs, target


def build(options: Options, size: Size, freezing: bool) -> tuple[Any, Any]:
    """Return an engine and its adapter."""
    os.environ["DS_ACCELERATOR"] = options.device
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import tf_adapters.deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    layers = [LayerSpec(Layer, size) for _ in range(size.layers)]
    model = PipelineModule(layers, num_stages=1, loss_fn=mean_square, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": size.rows,
        "gradient_accumulation_steps": size.microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": options.cuda},
    }
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    if not freezing:
        return engine, None
    adapter = tf_adapters.deepspeed.attach(engine, section(options))
    force_plan(adapter.controller, RATIO)
    return engine, adapter


PART = Part(
    title="DeepSpeed, one stage, ZeRO 1: memory around step()",
    run=run,
    missing=lambda options: no_package(options, "deepspeed"),
)
