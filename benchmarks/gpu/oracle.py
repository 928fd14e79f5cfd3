"""Gradients of masked training in Megatron-Core against an ordinary copy's, times the mask, averaged.

With Transformer Engine's layers on a GPU; Megatron's own, in place, deferred and from sampled tokens, on both. Each
case has a control: the same comparison with the masks of the next microbatch, which must fail.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.megatron import (
    MICROBATCHES,
    Case,
    build,
    engine_available,
    force_waiting_plan,
    named,
    prepare,
    run_batch,
    update,
)
from benchmarks.gpu.parts import NOT_RUN, WAYS, Check, Options, Part, no_package, section
from benchmarks.shared.megatron_samples import sampled_layers
from tf_adapters.testing.oracle import Samples, recorded_draws

RATIO = 0.8
FP8 = {"fp8": "hybrid"}
OWN_LAYERS = {f"Megatron's layers, {name}": Case(engine=False, settings=settings) for name, settings in WAYS.items()}
FUSED = {"Megatron's layers, fused weight gradients": Case(engine=False, model={"gradient_accumulation_fusion": True})}
FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
RECOMPUTED = {"Megatron's layers, recomputed": Case(engine=False, model=FULL)}
PRECISE: dict[str, Any] = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}
ENGINE = {
    **{f"Transformer Engine, {name}": Case(settings=settings) for name, settings in WAYS.items()},
    "Transformer Engine, fused weight gradients": Case(model={"gradient_accumulation_fusion": True}),
    **{f"fp8, {recipe}": Case(model={**FP8, "fp8_recipe": recipe}) for recipe in ("delayed", "tensorwise")},
    **{
        f"fp8, delayed, {name}": Case(model={**FP8, "fp8_recipe": "delayed"}, settings=WAYS[name])
        for name in ("deferred", "tokens")
    },
    "fp8, blockwise": Case(model={**FP8, "fp8_recipe": "blockwise"}),
    "fp8, mxfp8": Case(model={**FP8, "fp8_recipe": "mxfp8"}),
    "grouped linear": Case(model={"num_moe_experts": 4, "moe_grouped_gemm": True, "add_bias_linear": False}),
    "Transformer Engine, recomputed": Case(model=FULL),
    "precision-aware Adam": Case(sharded=True, optimizer=PRECISE),
}
Gradients = dict[str, torch.Tensor]


def run(options: Options) -> list[Check]:
    """Check every case that this machine can run. For each other case, return a line with the reason."""
    prepare(options)
    checks = []
    for name, case in {**OWN_LAYERS, **FUSED, **RECOMPUTED, **ENGINE}.items():
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


def missing(options: Options, case: Case) -> str:
    """Return the reason why a case cannot run here; "" if it can."""
    major = torch.cuda.get_device_capability()[0] if options.cuda else 0
    recipe = case.model.get("fp8_recipe")
    if case.engine and not engine_available(options):
        return "no Transformer Engine"
    if recipe and (major < 9 or (recipe == "mxfp8" and major < 10)):
        return f"this GPU has no {recipe} fp8"
    return ""


def of_case(options: Options, name: str, case: Case) -> list[Check]:
    """Run two steps under masks. The second step's gradients are compared before its update."""
    import tf_adapters.megatron

    model, optimizer = build(options, case)
    adapter = tf_adapters.megatron.attach(
        [model], optimizer, section(options, **case.settings), num_microbatches=MICROBATCHES
    )
    controller = adapter.controller
    force_waiting_plan(controller, RATIO)
    with recorded_draws() as draws:
        run_batch(options, model, 0, range(MICROBATCHES))
        update(optimizer)
        frozen = [controller.frozen_parameters(controller.step, 0, m) for m in range(MICROBATCHES)]
        number, before = controller.step, values(model)
        run_batch(options, model, 1, range(MICROBATCHES))
    found = gradients(model)
    samples: list[Samples] = [draws.get((number, 0, m), {}) for m in range(MICROBATCHES)]
    full = full_gradients(options, case, before, samples)
    update(optimizer)
    held = set.intersection(*map(set, frozen))
    moved = sum(not torch.equal(before[name], value) for name, value in values(model).items() if name in held)
    adapter.detach()
    limit = 0.02 if options.cuda else 1e-5
    if case.model.get("fp8_recipe") == "delayed":
        limit = 0.3  # the copy has other amax values before it, so it rounds in another way
    checks = [Check(f"{name}: worst gradient", worst(found, full, frozen), most=limit)]
    if any(frozen):  # sampled tokens hold nothing
        shifted = frozen[1:] + frozen[:1]
        checks.append(Check(f"{name}: held parameters that moved", moved, most=0))
        checks.append(Check(f"{name}: control", worst(found, full, shifted), least=0.5))
    return checks


def values(model: Any) -> Gradients:
    return {name: p.detach().clone() for name, p in named(model).items()}


def gradients(model: Any) -> Gradients:
    return {name: p.main_grad.detach().clone().float() for name, p in named(model).items()}


def full_gradients(options: Options, case: Case, weights: Gradients, samples: list[Samples]) -> list[Gradients]:
    """Return each microbatch's gradients, from a copy without adapter, recomputation and fused weight gradients."""
    own = {
        key: value for key, value in case.model.items() if not key.startswith(("recompute_", "gradient_accumulation_"))
    }
    from tf_adapters.megatron.chunks import innermost

    copy, _ = build(options, replace(case, model=own, optimizer={}, sharded=False))
    for name, parameter in named(copy).items():
        parameter.data.copy_(weights[name])
    found = []
    for microbatch in range(MICROBATCHES):
        with sampled_layers(innermost(copy), samples[microbatch]):
            run_batch(options, copy, 1, [microbatch])
        found.append(gradients(copy))
    return found


def worst(found: Gradients, full: list[Gradients], frozen: list[tuple[str, ...]]) -> float:
    """Return the largest relative error of a gradient. A norm counts as at least 1/1,000 of the largest norm."""
    masks = [set(names) for names in frozen]
    expected = {
        name: sum((f[name] for f, mask in zip(full, masks, strict=True) if name not in mask), torch.zeros_like(value))
        / len(full)
        for name, value in found.items()
    }
    sizes = {name: float(value.norm()) for name, value in expected.items()}
    least = 1e-3 * max(sizes.values())
    return max(float((found[name] - expected[name]).norm()) / max(sizes[name], least) for name in found)


PART = Part(
    title="oracle: Transformer Engine's layers, one stage, 4 microbatches",
    run=run,
    missing=lambda options: no_package(options, "megatron"),
)
