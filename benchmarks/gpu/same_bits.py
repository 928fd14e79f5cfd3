"""Deferred weight gradients with nothing frozen: the weights after some steps have the same bits as the host's alone.

The host is trained twice, to see whether its own kernels repeat their bits. Where they do not, the difference that
deferral makes is shown and not judged.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.megatron import MICROBATCHES, Case, build, force_waiting_plan, prepare, run_batch, update
from benchmarks.gpu.oracle import FP8, FUSED, OWN_LAYERS, RECOMPUTED, missing, values
from benchmarks.gpu.parts import NOT_RUN, WAYS, Check, Options, Part, no_package, section
from tf_adapters.overrides import Overrides
from tf_adapters.weight_gradients.taps import StageTaps

STEPS = 4
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_grouped_gemm": True, "add_bias_linear": False}
FUSION: dict[str, Any] = {"gradient_accumulation_fusion": True}
RECIPES = ("delayed", "tensorwise", "blockwise")
CASES = {
    "Megatron's layers": OWN_LAYERS["Megatron's layers, deferred"],
    **FUSED,
    **RECOMPUTED,
    "Transformer Engine": Case(),
    "Transformer Engine, fused weight gradients": Case(model=FUSION),
    "Transformer Engine, grouped linear": Case(model=EXPERTS),
    "Transformer Engine, grouped linear, fused": Case(model=EXPERTS | FUSION),
    **{f"fp8, {recipe}": Case(model={**FP8, "fp8_recipe": recipe}) for recipe in RECIPES},
    **{f"fp8, {recipe}, fused": Case(model={**FP8, "fp8_recipe": recipe, **FUSION}) for recipe in RECIPES},
}


def run(options: Options) -> list[Check]:
    """Check every case that this machine can run. For each other case, return a line with the reason."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    prepare(options)
    checks = []
    for name, case in CASES.items():
        reason = missing(options, case)
        checks += [Check(name + NOT_RUN, 1, note=reason)] if reason else attempted(options, name, case)
        gc.collect()
    return checks


def attempted(options: Options, name: str, case: Case) -> list[Check]:
    """Return a case's checks. If the case raises, it has failed, and the other cases still run."""
    try:
        return of_case(options, name, case)
    except Exception as error:
        return [Check(f"{name}: ran", 0, least=1, note=f"{type(error).__name__}: {error}"[:300])]


def of_case(options: Options, name: str, case: Case) -> list[Check]:
    """Train the host alone twice, then with deferral."""
    alone, again = (trained(options, case) for _ in range(2))
    with waiting() as waited:
        deferred = trained(options, case, deferred=True)
    repeats = differing(alone, again)
    return [
        Check(f"{name}: parameters that differ between two runs of the host", repeats),
        Check(f"{name}: parameters that differ with deferral", differing(alone, deferred), most=None if repeats else 0),
        Check(f"{name}: calls whose weight gradient waited", len(waited), least=1),
    ]


@contextmanager
def waiting() -> Iterator[list[Any]]:
    """Collect an entry for each weight gradient that is deferred in the block."""
    waited: list[Any] = []
    keep, overrides = StageTaps.keep, Overrides()

    def counted(taps: StageTaps, microbatch: int, *args: Any, **kwargs: Any) -> None:
        waited.append(microbatch)
        keep(taps, microbatch, *args, **kwargs)

    overrides.set(StageTaps, "keep", counted)
    try:
        yield waited
    finally:
        overrides.restore()


def trained(options: Options, case: Case, deferred: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights after some steps."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    import tf_adapters.megatron

    torch.manual_seed(11)
    model_parallel_cuda_manual_seed(11)
    model, optimizer = build(options, case)
    adapter = None
    if deferred:
        settings = section(options, **WAYS["deferred"])
        adapter = tf_adapters.megatron.attach([model], optimizer, settings, num_microbatches=MICROBATCHES)
        force_waiting_plan(adapter.controller, 0.0)
    for step in range(STEPS):
        run_batch(options, model, step, range(MICROBATCHES))
        update(optimizer)
    found = values(model)
    if adapter is not None:
        adapter.detach()
    return found


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    return sum(not torch.equal(value, other[name]) for name, value in one.items())


PART = Part(
    title="same bits: deferred weight gradients, one stage, 4 microbatches",
    run=run,
    missing=lambda options: no_package(options, "megatron"),
)
