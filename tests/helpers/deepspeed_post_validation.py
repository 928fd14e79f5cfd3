"""Trainings on DeepSpeed's engine that clip gradients, with updates before or after the norm is known."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from deepspeed_ranks import VOCABULARY, Case, batch, batches, build_engine, optimizer_state
from logged import Lines
from post_validated_runs import pausing, shifted

from tf_adapters.hosts.late import LateTensor
from tf_adapters.testing import force_plan
from tf_adapters.training.phases import Phase


def limited(case: Case, limit: float) -> Case:
    return replace(case, config={**case.config, "gradient_clipping": limit})


def disturb(engine: Any) -> list[int]:
    """Let forwards draw random numbers of two kinds and count themselves. Return where the current step is kept.

    A forward that runs again must draw the same numbers, and must not be counted twice.
    """
    step = [0]
    for name, layer in engine.module.named_children():
        if not name.isdigit():
            continue
        layer.register_buffer("forwards", torch.zeros(()))

        def drop(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            module.forwards += 1
            return torch.nn.functional.dropout(output, 0.1) * (1.0 + 0.1 * random.random())

        layer.register_forward_hook(drop)
    return step


def drawing(microbatches: list[Any]) -> Any:
    """Data that draws random numbers while it is loaded."""
    for tokens, labels in microbatches:
        yield shifted(tokens, VOCABULARY), labels


def overflowing(engine: Any, step: list[int], steps: tuple[int, ...]) -> None:
    """Make the gradients of the first stage infinite in these steps. All other gradients stay as they are."""
    if engine.stage_id == 0:
        weight = next(engine.module.parameters())
        weight.register_hook(lambda gradient: gradient * float("inf") if step[0] in steps else gradient)


def values(engine: Any) -> list[torch.Tensor]:
    """The trained parameters through ``state_dict``, and what the optimizer holds."""
    found = [value.detach().clone() for _, value in sorted(engine.module.state_dict().items())]
    return found + [v for _, state in sorted(optimizer_state(engine).items()) for _, v in sorted(state.items())]


def trained(
    case: Case, pauses: bool = False, saved: tuple[int, ...] = (), overflows: tuple[int, ...] = (), directory: str = ""
) -> dict[str, Any]:
    """Train; ``saved`` are steps after which the state is read and a batch is evaluated."""
    import tf_adapters.deepspeed

    with Lines() as log, pausing(pauses):
        engine = build_engine(case)
        adapter = tf_adapters.deepspeed.attach(engine)
        if adapter is not None and case.ratios is not None:
            force_plan(adapter.controller, case.ratios)
        step_now = disturb(engine)
        overflowing(engine, step_now, overflows)
        torch.manual_seed(5)
        random.seed(5)
        replica, losses, norms, between, held = engine.grid.data_parallel_id, [], [], [], 0
        for step in range(case.steps):
            step_now[0] = step
            losses.append(engine.train_batch(drawing(batch(step, replica, case.microbatches))))
            norms.append(engine.get_global_grad_norm())
            held += len(adapter.validation._held) if adapter and adapter.validation else 0
            if step in saved:
                if adapter is not None and directory:
                    engine.save_checkpoint(directory, tag=f"step{step}")
                between += values(engine)
                evaluated = engine.eval_batch(batches(range(500, 501), replica, case.microbatches))
                between.append(torch.as_tensor(evaluated).clone())
        result: dict[str, Any] = {
            "losses": [str(float(loss)) for loss in losses],
            "late": [isinstance(norm, LateTensor) for norm in norms],
            "norms": [str(float(norm)) for norm in norms],
        }
        if adapter is not None:
            validation, state = adapter.validation, adapter.controller.state
            held_bytes = adapter.controller.memory.held(Phase.MONITORING_UPPER)
            result["copies"] = held_bytes.copies if held_bytes else None
            adapter.detach()
            result["failure"] = state.failure
            result["counts"] = (validation.updates, validation.made_again) if validation else None
        result |= {"held": held, "skipped": engine.skipped_steps, "rate": engine.get_lr()}
        return {**result, "final": values(engine), "between": between, "log": log.seen}


def assert_same_bits(ours: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["failure"] is None
        for what in ("losses", "norms", "skipped", "rate"):
            assert mine[what] == theirs[what], what
        for a, b in zip(mine["final"] + mine["between"], theirs["final"] + theirs["between"], strict=True):
            assert torch.equal(a, b)


__all__ = ["assert_same_bits", "limited", "trained", "values"]
