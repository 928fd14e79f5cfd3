"""Trainings on Megatron-Core that clip gradients, with updates before or after the norm is known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import megatron_ranks
import pytest
import torch
from logged import Lines
from megatron_ranks import VOCABULARY, Case, innermost, run_batch, start, zero_gradients
from post_validated_runs import pausing, shifted

from tf_adapters.hosts.late import LateTensor


def limited(case: Case, limit: float) -> Case:
    return replace(case, optimizer={**case.optimizer, "clip_grad": limit})


def drawing(data: Any, length: int) -> Iterator[Any]:
    """Data that draws random numbers while it is loaded."""
    for tokens, labels in data:
        yield shifted(tokens[:, :length], VOCABULARY), labels[:, :length]


def values(chunks: list[Any], optimizer: Any) -> list[torch.Tensor]:
    """The trained parameters through ``state_dict``, and what the inner optimizers hold."""
    states = [innermost(chunk).state_dict() for chunk in chunks]
    found = [v.detach().clone() for state in states for _, v in sorted(state.items()) if torch.is_tensor(v)]
    for leaf in optimizer.chained_optimizers:
        inner = leaf.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                state = inner.state.get(p, {})
                found += [p.detach().clone(), *(v.clone() for _, v in sorted(state.items()) if torch.is_tensor(v))]
    return found


def trained(case: Case, pauses: bool = False, saved: tuple[int, ...] = ()) -> dict[str, Any]:
    """Train; ``saved`` are steps after which the state is read and a batch is evaluated."""
    with Lines() as log, pausing(pauses), pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_ranks, "_cut", drawing)
        random.seed(5)
        chunks, optimizer, adapter = start(case)
        losses, norms, late, between = [], [], [], []
        for step in range(case.steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * 0.9**step
            zero_gradients(chunks, optimizer)
            losses += run_batch(case, chunks, step, range(case.microbatches))
            norm = optimizer.step()[1]
            late.append(isinstance(norm, LateTensor))
            norms.append(norm)
            if step in saved:
                between += values(chunks, optimizer)
                with torch.no_grad():
                    evaluated = run_batch(case, chunks, 500, range(case.microbatches), forward_only=True)
                between += [entry["loss"] for entry in evaluated]
        result: dict[str, Any] = {
            "losses": [float(entry["loss"]) for entry in losses],
            "norms": [float(norm) for norm in norms],
            "late": late,
        }
        if adapter is not None:
            validation, state = adapter.validation, adapter.controller.state
            adapter.detach()
            result |= {"failure": state.failure, "counts": (validation.updates, validation.made_again)}
        return {**result, "final": values(chunks, optimizer), "between": between, "log": log.seen}


def assert_same_bits(ours: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["failure"] is None
        assert mine["losses"] == theirs["losses"]
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
        for a, b in zip(mine["final"] + mine["between"], theirs["final"] + theirs["between"], strict=True):
            assert torch.equal(a, b)
