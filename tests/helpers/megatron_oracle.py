"""Cases of the Megatron tests, and the check that gradients are means over microbatches of (mask x full gradient)."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron_ranks import Case

from tf_adapters.testing import relative_error

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
# With biases, Megatron alone never ends under this one (0.16.1).
SELECTIVE_MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": False}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
BF16_OPTIMIZER = {"bf16": True, "params_dtype": torch.bfloat16}
FP16 = {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
FP16_OPTIMIZER = {"fp16": True, "params_dtype": torch.float16, "loss_scale": 64.0}
FUSED = {"gradient_accumulation_fusion": True}
OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True}
GATHER = {**SHARDED, **OVERLAP, "overlap_param_gather": True}
GATHER_OPTIMIZER = {**SHARDED, "overlap_param_gather": True}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_ffn_hidden_size": 16}
STAGE_0 = {"0B1": 1.0, "0B2": 0.5, "1B0": 0.7, "1B3": 1.0}
LAST_MICROBATCH = {"0B3": 1.0, "1B3": 1.0, "0B1": 0.5}
ALL_STEP = {**{f"0B{m}": 1.0 for m in range(4)}, **{f"1B{m}": 0.9 for m in range(4)}}


def shortened(case: Case) -> Case:
    """Two steps show what there is to see; with overlap the first one only counts what the others then wait for."""
    return replace(case, steps=3 if case.ddp.get("overlap_grad_reduce") else 2)


TWO_RANKS = {
    "1f1b": Case(ratios=0.5),
    "no pipelining": Case(pp=1, layers=2, ratios=0.5),
    "interleaved": Case(vp=2, ratios=0.5),
    "interleaved groups of 4": Case(vp=2, ratios=0.5, model={"microbatch_group_size_per_vp_stage": 4}),
    "interleaved groups of 3, 8 microbatches": Case(
        vp=2, microbatches=8, ratios=0.5, model={"microbatch_group_size_per_vp_stage": 3}
    ),
    "interleaved, three chunks": Case(vp=3, layers=6, ratios=0.6),
    "stage 0 frozen whole": Case(ratios=STAGE_0),
    "stage 0 frozen all step": Case(ratios=ALL_STEP),
    "everything frozen": Case(ratios=1.0),
    "interleaved, everything frozen": Case(vp=2, ratios=1.0),
    "clipping": Case(ratios=0.5, optimizer={"clip_grad": 0.1}),
    "fused gradients": Case(ratios=0.5, model=FUSED),
    "tied": Case(tied=True, ratios=0.8),
    "tied, stage 0 frozen all step": Case(tied=True, ratios=ALL_STEP),
    "tied, interleaved": Case(tied=True, vp=2, ratios=0.8),
    "tied, no pipelining": Case(tied=True, pp=1, layers=2, ratios=0.5),
    "full recompute": Case(ratios=0.7, model=FULL),
    "full recompute, stage 0 frozen whole": Case(ratios=STAGE_0, model=FULL),
    "full recompute, interleaved": Case(vp=2, ratios=0.7, model=FULL),
    "selective recompute": Case(ratios=0.7, model=SELECTIVE),
    "selective recompute of mlp": Case(ratios=0.8, model=SELECTIVE_MLP),
    "bf16": Case(ratios=0.5, model=BF16, optimizer=BF16_OPTIMIZER),
    "bf16, everything frozen": Case(ratios=1.0, model=BF16, optimizer=BF16_OPTIMIZER),
    "bf16, full recompute": Case(ratios=0.7, model={**BF16, **FULL}, optimizer=BF16_OPTIMIZER),
    "fp16 with loss scale": Case(ratios=0.5, model=FP16, optimizer=FP16_OPTIMIZER),
    "interleaved, bf16": Case(vp=2, ratios=0.5, model=BF16, optimizer=BF16_OPTIMIZER),
    "interleaved, fp16 with loss scale": Case(vp=2, ratios=0.5, model=FP16, optimizer=FP16_OPTIMIZER),
    "interleaved, experts": Case(vp=2, ratios=0.5, model=MOE),
    "distributed optimizer": Case(ratios=0.5, ddp=SHARDED, optimizer=SHARDED),
    "tensor parallel": Case(pp=1, tp=2, layers=2, ratios=0.5),
    "tensor parallel, everything frozen": Case(pp=1, tp=2, layers=2, ratios=1.0),
    "sequence parallel": Case(pp=1, tp=2, layers=2, ratios=0.5, model={"sequence_parallel": True}),
    "sequence parallel, full recompute": Case(
        pp=1, tp=2, layers=2, ratios=0.7, model={"sequence_parallel": True, **FULL}
    ),
    "replicas": Case(pp=1, layers=2, ratios=0.5),
    "replicas, overlap": Case(pp=1, layers=2, ratios=0.5, ddp=OVERLAP),
    "replicas, overlap, last microbatch frozen": Case(pp=1, layers=2, ratios={"0B3": 1.0, "0B1": 0.5}, ddp=OVERLAP),
    "replicas, sharded": Case(pp=1, layers=2, ratios=0.5, ddp=SHARDED, optimizer=SHARDED),
    "replicas, sharded, overlap": Case(pp=1, layers=2, ratios=0.8, ddp={**SHARDED, **OVERLAP}, optimizer=SHARDED),
    "replicas, gather": Case(pp=1, layers=2, ratios=0.8, ddp=GATHER, optimizer=GATHER_OPTIMIZER),
    "replicas, gather, full recompute": Case(
        pp=1, layers=2, ratios=0.8, ddp=GATHER, optimizer=GATHER_OPTIMIZER, model=FULL
    ),
    "replicas, gather, bf16": Case(
        pp=1,
        layers=2,
        ratios=0.8,
        ddp=GATHER,
        model={k: v for k, v in BF16.items() if k != "pipeline_dtype"},
        optimizer={**GATHER_OPTIMIZER, **BF16_OPTIMIZER},
    ),
    "experts": Case(layers=4, ratios=0.5, model=MOE),
    "expert parallel": Case(pp=1, ep=2, layers=2, ratios=0.6, model=MOE),
    "expert parallel, overlap": Case(pp=1, ep=2, layers=2, ratios=0.6, model=MOE, ddp=OVERLAP),
}
TWO_RANKS |= {
    "V": Case(vp=2, v=True, ratios=0.5),
    "V, tied": Case(vp=2, v=True, tied=True, ratios=0.7),
    "V, bf16": Case(vp=2, v=True, ratios=0.5, model=BF16, optimizer=BF16_OPTIMIZER),
    "V, full recompute": Case(vp=2, v=True, ratios=0.7, model=FULL),
    "V, experts": Case(vp=2, v=True, ratios=0.5, model=MOE),
    "V, distributed optimizer": Case(vp=2, v=True, ratios=0.5, ddp=SHARDED, optimizer=SHARDED),
}
TWO_RANKS = {name: shortened(case) for name, case in TWO_RANKS.items()}
FOUR_RANKS = {
    "pipeline 4": Case(pp=4, microbatches=6, ratios=0.6, steps=2),
    "pipeline 4, interleaved": Case(pp=4, vp=2, layers=8, microbatches=8, ratios=0.6, steps=2),
    "V of 8": Case(pp=4, vp=2, v=True, layers=9, microbatches=8, ratios=0.6, steps=2),
    "V, sequence parallel 2, tied": Case(
        vp=2, v=True, tp=2, tied=True, ratios=0.6, steps=2, model={"sequence_parallel": True}
    ),
    "V, replicas 2, overlap, tied": Case(vp=2, v=True, tied=True, ratios=0.7, steps=3, ddp=OVERLAP),
    "V, replicas 2, gather": Case(
        vp=2,
        v=True,
        tied=True,
        ratios=0.7,
        steps=3,
        ddp={**GATHER, "align_param_gather": True},
        align=True,
        optimizer=GATHER_OPTIMIZER,
    ),
    "pipeline 2, tensor 2": Case(tp=2, ratios=0.6, steps=2),
    "pipeline 2, sequence parallel 2": Case(tp=2, ratios=0.6, steps=2, model={"sequence_parallel": True}),
    "pipeline 2, tied, sequence parallel 2": Case(
        tp=2, tied=True, ratios=0.6, steps=2, model={"sequence_parallel": True}
    ),
    "pipeline 2, replicas 2, overlap": Case(ratios=LAST_MICROBATCH, steps=3, ddp=OVERLAP),
    "pipeline 2, replicas 2, aligned reduce": Case(ratios=0.6, steps=3, ddp=OVERLAP, align=True),
    "interleaved, replicas 2, gather": Case(
        vp=2, ratios=0.7, steps=3, ddp={**GATHER, "align_param_gather": True}, align=True, optimizer=GATHER_OPTIMIZER
    ),
    "interleaved, replicas 2, overlap, tied": Case(vp=2, tied=True, ratios=0.7, steps=3, ddp=OVERLAP),
    "pipeline 2, expert parallel 2": Case(ep=2, ratios=0.6, steps=2, model=MOE),
    "interleaved, tensor 2": Case(vp=2, tp=2, ratios=0.6, steps=2),
    "interleaved, sequence parallel 2": Case(vp=2, tp=2, ratios=0.6, steps=2, model={"sequence_parallel": True}),
    "interleaved, expert parallel 2": Case(vp=2, ep=2, ratios=0.6, steps=2, model=MOE),
}


def check_oracle(case: Case, ranks: list[dict]) -> None:
    tolerance = 3e-2 if case.model.get("bf16") or case.model.get("fp16") else 1e-5
    scale = case.optimizer.get("loss_scale", 1.0)
    for number in range(case.steps):
        covered: dict[tuple, int] = {}
        for rank in ranks:
            step = rank["steps"][number]
            for key, actual in step["gradients"].items():
                expected = expected_gradient(case, ranks, rank, number, key) * scale
                first, last = step["owned"][key]
                check(actual.flatten()[first:last], expected.flatten()[first:last], tolerance, f"step {number}: {key}")
                place = (key, rank["place"][1])
                covered[place] = covered.get(place, 0) + last - first
                assert covered[place] <= len(ranks) * expected.numel()
        for rank in ranks:
            for key, actual in rank["steps"][number]["gradients"].items():
                assert covered[key, rank["place"][1]] >= actual.numel(), f"nobody checked all of {key}"


def check_same(ours: list[dict], alone: list[dict]) -> None:
    """Losses and weights of a run are those of the host alone, to the bit."""
    for mine, theirs in zip(ours, alone, strict=True):
        for own, host in zip(mine["steps"], theirs["steps"], strict=True):
            assert own["losses"] == host["losses"]
            assert own.get("evaluations") == host.get("evaluations")
            for weight, value in host["after"].items():
                assert torch.equal(own["after"][weight], value), weight


def check(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    if expected.norm() == 0:
        assert actual.numel() == 0 or actual.abs().max() == 0, f"{what} is frozen but has a gradient"
    else:
        error = relative_error(actual, expected)
        assert error <= tolerance, f"{what} is off by {error:.1e}"


def expected_gradient(case: Case, ranks: list[dict], rank: dict, number: int, key: tuple[int, str]) -> torch.Tensor:
    """The mean of the masked full gradients; for a tied weight the sum of that over the places that hold it."""
    uses = embedding_uses(case)
    if key not in uses.values():
        of_key = rank["steps"][number]
        unused = case.tied and key[1] == OUTPUT  # where the last stage has the embedding, it computes with that
        return torch.zeros_like(of_key["gradients"][key]) if unused else masked_mean(of_key, key, key)
    total = torch.zeros(())
    for use, masked_as in sorted(uses.items()):
        holder = next(r for r in ranks if r["place"] == rank["place"] and use in r["steps"][number]["full"][0])
        total = total + masked_mean(holder["steps"][number], use, masked_as)
    return total


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def embedding_uses(case: Case) -> dict[tuple[int, str], tuple[int, str]]:
    """Where the embedding is used in a copy of the model that ties nothing, each with the parameter that it is."""
    last = case.pp * (case.vp or 1) - 1
    uses = {(0, EMBEDDING): (0, EMBEDDING)}
    if case.model.get("mtp_num_layers"):
        uses[last, EMBEDDING] = (last, EMBEDDING)
    if case.tied:
        uses[last, OUTPUT] = (last, EMBEDDING) if (last, EMBEDDING) in uses else (last, OUTPUT)
    return uses


def masked_mean(step: dict, key: tuple[int, str], masked_as: tuple[int, str]) -> torch.Tensor:
    stage, name = masked_as
    kept = [full[key] * (name not in step["masks"][stage, m]) for m, full in enumerate(step["full"])]
    computed = sum(name not in step["masks"][stage, m] for m in range(len(kept)))
    return torch.stack(kept).sum(0) / (max(1, computed) if step["computed_mean"] else len(kept))
