"""Cases of the DeepSpeed tests, and the check that gradients are means over microbatches of (mask x full gradient)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import metadata

import torch
from deepspeed_ranks import Case, Ordinary, batch, loss_fn

from tf_adapters.testing import masked_gradients, relative_error
from tf_adapters.testing.oracle import Sampled

CHECKPOINTS_ON_CPU = tuple(map(int, metadata.version("deepspeed").split(".")[:3])) >= (0, 19, 8)
ZERO1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
REENTRANT = {"pipeline": {"activation_checkpoint_interval": 1}}
NON_REENTRANT = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}
SKIP_STAGE_0 = {"0B1": 1.0, "0B2": 0.5, "1B0": 0.7, "1B3": 1.0}
ALL_STEP = {**{f"0B{m}": 1.0 for m in range(4)}, **{f"1B{m}": 0.9 for m in range(4)}}
STEPS = 2
"""The second one begins with what the first one has left."""

CASES = {
    "fp32": Case(ratios=0.5),
    "zero1": Case(config=ZERO1, ratios=0.5),
    "clipping": Case(config={**ZERO1, "gradient_clipping": 0.1}, ratios=0.5),
    "gpipe": Case(section={"schedule": "gpipe"}, ratios=0.5),
    "gpipe zero1": Case(section={"schedule": "gpipe"}, config=ZERO1, ratios=0.5),
    "gpipe bf16": Case(section={"schedule": "gpipe"}, config={**BF16, **ZERO1}, ratios=0.5),
    "gpipe clipping": Case(section={"schedule": "gpipe"}, config={**ZERO1, "gradient_clipping": 0.1}, ratios=0.5),
    "gpipe tied": Case(section={"schedule": "gpipe"}, tied=True, ratios=0.8),
    "gpipe reentrant": Case(section={"schedule": "gpipe"}, config=REENTRANT, ratios=0.7),
    "gpipe non-reentrant": Case(section={"schedule": "gpipe"}, config=NON_REENTRANT, ratios=0.7),
    "gpipe autocast": Case(section={"schedule": "gpipe"}, config=AUTOCAST, ratios=0.5),
    "clipping bf16": Case(config={**BF16, **ZERO1, "gradient_clipping": 0.1}, ratios=0.5),
    "non-reentrant zero1": Case(config={**NON_REENTRANT, **ZERO1}, ratios=0.7),
    "non-reentrant bf16": Case(config={**NON_REENTRANT, **BF16, **ZERO1}, ratios=0.7),
    "tied": Case(tied=True, ratios=0.8),
    "tied zero1": Case(tied=True, config=ZERO1, ratios=0.8),
    "tied frozen all step": Case(tied=True, ratios=ALL_STEP),
    "stage 0 frozen whole": Case(ratios=SKIP_STAGE_0),
    "stage 0 frozen whole zero1": Case(config=ZERO1, ratios=SKIP_STAGE_0),
    "stage 0 frozen all step": Case(ratios=ALL_STEP),
    "stage 0 frozen all step zero1": Case(config=ZERO1, ratios=ALL_STEP),
    "everything frozen": Case(ratios=1.0),
    "reentrant": Case(config=REENTRANT, ratios=0.7),
    "reentrant, stage 0 frozen whole": Case(config=REENTRANT, ratios=SKIP_STAGE_0),
    "reentrant zero1": Case(config={**REENTRANT, **ZERO1}, ratios=0.7),
    "non-reentrant": Case(config=NON_REENTRANT, ratios=0.7),
    "interval 2": Case(config={"pipeline": {"activation_checkpoint_interval": 2}}, ratios=0.7),
    "one stage": Case(stages=1, ratios=0.5),
    "bf16": Case(config={**BF16, **ZERO1}, ratios=0.5),
    "bf16 immediate": Case(
        config={**BF16, **ZERO1, "bf16": {"enabled": True, "immediate_grad_update": True}}, ratios=0.5
    ),
    "bf16 gradients": Case(config={**BF16, **ZERO1, "data_types": {"grad_accum_dtype": "bf16"}}, ratios=0.5),
    "bf16 autocast": Case(config=AUTOCAST, ratios=0.5),
    "bf16 autocast zero1": Case(config={**AUTOCAST, **ZERO1}, ratios=0.5),
    "bf16 zero0": Case(config={**BF16, "data_types": {"grad_accum_dtype": "bf16"}}, ratios=0.5),
    "bf16 tied frozen all step": Case(tied=True, config={**BF16, **ZERO1}, ratios=ALL_STEP),
    "bf16 reentrant": Case(config={**BF16, **ZERO1, **REENTRANT}, ratios=0.7),
}
CASES = {name: replace(case, steps=STEPS) for name, case in CASES.items()}
HAS_DUALPIPEV = CHECKPOINTS_ON_CPU  # both came with 0.19.8
REPLICATED = {
    "fp32": Case(ratios=0.5, steps=STEPS),
    "zero1": Case(config=ZERO1, ratios=0.8, steps=STEPS),
    "zero1 frozen all step": Case(config=ZERO1, ratios=ALL_STEP, steps=STEPS),
    "bf16": Case(config={**BF16, **ZERO1}, ratios=0.5, steps=STEPS),
    "tied": Case(tied=True, config=ZERO1, ratios=0.8, steps=STEPS),
    "gpipe": Case(section={"schedule": "gpipe"}, ratios=0.8, steps=STEPS),
}


def check_oracle(case: Case, ranks: list[dict]) -> None:
    tolerance = 3e-2 if {"bf16", "torch_autocast"} & case.config.keys() else 1e-5
    for number in range(len(ranks[0]["steps"])):
        actual = gathered_gradients([(rank, rank["steps"][number]) for rank in ranks])
        for name, expected in expected_gradients(case, ranks, number).items():
            if expected.norm() == 0:
                assert actual[name].abs().max() == 0, f"step {number}: {name} is frozen but has a gradient"
            else:
                error = relative_error(actual[name], expected)
                assert error <= tolerance, f"step {number}: {name} is off by {error:.1e}"


def gathered_gradients(steps: list[tuple[dict, dict]]) -> dict[str, torch.Tensor]:
    """Whole gradients by name. Replicas hold equal gradients, or fragments that add up."""
    by_stage: dict[int, list[dict[str, torch.Tensor]]] = {}
    for rank, step in steps:
        by_stage.setdefault(rank["stage"], []).append(step["gradients"])
    whole: dict[str, torch.Tensor] = {}
    for replicas in by_stage.values():
        for name, first in replicas[0].items():
            same = all(torch.equal(first, other[name]) for other in replicas)
            whole[name] = first if same else torch.stack([other[name] for other in replicas]).sum(0)
    return whole


def expected_gradients(case: Case, ranks: list[dict], number: int) -> dict[str, torch.Tensor]:
    """By the pipeline's names, from an ordinary copy of the model as it was before the step."""
    state = {rank["stage"]: rank["steps"][number]["before"] for rank in ranks}
    ordinary = Ordinary(case, [state[stage] for stage in sorted(state)])
    masks = ranks[0]["steps"][number]["masks"]

    def frozen(microbatch: int) -> set[str]:
        return {ordinary.rename(n, s) for (s, m), names in masks.items() if m == microbatch for n in names}

    def samples(replica: int, microbatch: int) -> dict[str, Sampled]:
        step = ranks[0]["steps"][number]["number"]
        return {
            ordinary.rename(name, stage): of_weight
            for rank in ranks
            if rank["replica"] == replica
            for (drawn, stage, m), of_action in rank["draws"].items()
            if (drawn, m) == (step, microbatch)
            for name, of_weight in of_action.items()
        }

    scale = (case.section or {}).get("gradient_scale", "skipped_as_zero")
    replicas = sorted({rank["replica"] for rank in ranks})
    per_replica = [
        masked_gradients(
            ordinary,
            batch(number, replica, case.microbatches_in(number)),
            loss_fn,
            frozen,
            gradient_scale=scale,
            samples=partial(samples, replica),
        )
        for replica in replicas
    ]
    expected: dict[str, torch.Tensor] = {}
    for stage, values in sorted(state.items()):
        for name in values:
            for place in ordinary.stages_of(stage, name):
                mean = torch.stack([g[ordinary.rename(name, place)] for g in per_replica]).mean(0)
                expected[name] = expected[name] + mean if name in expected else mean
    return clipped(expected, case.config.get("gradient_clipping"))


def clipped(gradients: dict[str, torch.Tensor], limit: float | None) -> dict[str, torch.Tensor]:
    if limit is None:
        return gradients
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    scale = max(1.0, float(norm + 1e-6) / limit)
    return {name: g / scale for name, g in gradients.items()}
