"""Cases of the torch tests, and the check that gradients are means over microbatches of (mask x full gradient)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch_ranks import Case, Layers, batch, loss_fn, plain

from tf_adapters.testing import masked_gradients, relative_error
from tf_adapters.testing.oracle import Sampled

PLANS = (
    {"0": 0.5, "0.1": 1.0, "0.2": 1.0, "1": 0.5, "2": 0.7, "3": 0.5},  # stage 0 frozen whole for two microbatches
    {"0": 1.0, "1": 0.8},  # stage 0 frozen all step
    {"0": 0.5, "1": 1.0, "2": 0.3, "3": 1.0},  # the last stage of two or of four frozen all step
    1.0,
)
REPLICATED = {
    "ddp": Case(replicas="ddp"),
    # DDP itself fails where all of a stage's forwards come before its first backward, as with four microbatches.
    "ddp interleaved": Case(replicas="ddp", microbatches=8, schedule="ScheduleInterleaved1F1B"),
    "ddp gradients as views": Case(replicas="ddp view"),
    "tp": Case(replicas="tp"),
    "tp zbv": Case(replicas="tp", schedule="ScheduleZBVZeroBubble"),
    "tp gpipe": Case(replicas="tp", schedule="ScheduleGPipe"),
    "tp looped": Case(replicas="tp", schedule="ScheduleLoopedBFS"),
    "tp interleaved": Case(replicas="tp", schedule="ScheduleInterleaved1F1B"),
    "tp zero bubble": Case(replicas="tp", schedule="ScheduleInterleavedZeroBubble"),
    "tp dualpipev": Case(replicas="tp", schedule="ScheduleDualPipeV"),
    "fsdp gpipe": Case(replicas="fsdp", schedule="ScheduleGPipe"),
    "fsdp 1f1b, parts too": Case(replicas="fsdp nested"),
    "fsdp 1f1b, resharded": Case(replicas="fsdp whole"),
    "fsdp looped, parts too": Case(replicas="fsdp nested", schedule="ScheduleLoopedBFS"),
    "fsdp interleaved": Case(replicas="fsdp", schedule="ScheduleInterleaved1F1B"),
    "fsdp zero bubble": Case(replicas="fsdp", schedule="ScheduleInterleavedZeroBubble"),
    "fsdp zbv, parts too, kept": Case(replicas="fsdp kept", schedule="ScheduleZBVZeroBubble"),
    "fsdp dualpipev": Case(replicas="fsdp", schedule="ScheduleDualPipeV"),
    "fsdp offloaded": Case(replicas="fsdp offloaded"),
    "replicate": Case(replicas="replicate"),
    "replicate interleaved": Case(replicas="replicate", schedule="ScheduleInterleaved1F1B"),
    "replicate zbv": Case(replicas="replicate", schedule="ScheduleZBVZeroBubble"),
}


def check_oracle(case: Case, ranks: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    for number in range(case.steps):
        actual = gathered([rank["steps"][number]["gradients"] for rank in ranks])
        expected = expected_gradients(case, ranks, number)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            if gradient.norm() == 0:
                assert actual[name].abs().max() == 0, f"step {number}: {name} is frozen but has a gradient"
            else:
                error = relative_error(actual[name], gradient)
                assert error <= tolerance, f"step {number}: {name} is off by {error:.1e}"
        assert all(rank["steps"][number]["still_trained"] == rank["steps"][number]["trained"] for rank in ranks)


def gathered(of_ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All stages' gradients by name. Replicas hold the same."""
    everything: dict[str, torch.Tensor] = {}
    for gradients in of_ranks:
        for name, gradient in gradients.items():
            assert torch.equal(everything.setdefault(name, gradient), gradient), f"{name} differs between replicas"
    return everything


def expected_gradients(case: Case, ranks: list[dict[str, Any]], number: int) -> dict[str, torch.Tensor]:
    ordinary = Layers(adapted=case.adapted).to(case.dtype)
    ordinary.load_state_dict(gathered([rank["steps"][number]["before"] for rank in ranks]))
    masks = ranks[0]["steps"][number]["masks"]

    def frozen(microbatch: int) -> set[str]:
        return {name for (_, m), names in masks.items() if m == microbatch for name in names}

    def samples(replica: int, microbatch: int) -> dict[str, Sampled]:
        drawn = {}
        for rank in ranks:
            for (step, _, m), of_action in rank.get("draws", {}).items():
                if (rank["replica"], step, m) == (replica, rank["steps"][number]["number"], microbatch):
                    drawn |= {plain(name): of_weight for name, of_weight in of_action.items()}
        return drawn

    totals: dict[str, torch.Tensor] = {}
    scale = (case.section or {}).get("gradient_scale", "skipped_as_zero")
    replicas = sorted({rank["replica"] for rank in ranks})
    for replica in replicas:
        for part in range(case.batches):
            tensors = batch(case, number, replica, part)
            microbatches = zip(*(tensor.chunk(case.microbatches) for tensor in tensors), strict=True)
            drawn = partial(samples, replica)
            for name, gradient in masked_gradients(ordinary, microbatches, loss_fn, frozen, scale, drawn).items():
                totals[name] = totals.get(name, 0) + gradient / (len(replicas) * case.batches)
    return totals
