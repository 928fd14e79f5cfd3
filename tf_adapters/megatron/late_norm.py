"""Keeps ranks from waiting for the norm of all gradients if it is only logged and clips nothing.

Megatron's chained optimizer reduces the norm over all ranks in every step, also with ``clip_grad`` 0. The adapter gives
it a tensor at once (``LateNorms``), and only reading its value waits. A training loop reads it when it logs. The value
is the host's up to the rounding of a sum.
Source: megatron/core/optimizer/optimizer.py (``ChainedOptimizer.get_grad_norm``), clip_grads.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer

import megatron_patches.reductions
from megatron_patches.reductions import Loop
from tf_adapters.hosts.late import LateTensor
from tf_adapters.hosts.support import missing_name
from tf_adapters.megatron.chunks import innermost
from tf_adapters.megatron.optimizers import leaves

_NAMES = ("get_grad_stats_parallel_group", "get_main_grads_for_grad_norm")


def norm_can_be_late(optimizer: Any) -> bool:
    """Return whether this rank's optimizer always updates, and only logs the norm of all ranks.

    If this holds on all ranks, the statistics of a step (success, norm, logged learning rate) are equal on all ranks.
    """
    if any(_clip_grad(optimizer)):
        return False
    if type(optimizer) is not ChainedOptimizer or not leaves(optimizer):
        return False
    if any(missing_name(of, ("get_grad_norm", *_NAMES)) for of in (optimizer, *optimizer.chained_optimizers)):
        return False
    if missing_name(clip_grads, ("l2_norm_impl", "multi_tensor_applier")):
        return False
    logged = any(group.get("default_config") for group in optimizer.param_groups)  # whose learning rate is logged
    several = len(optimizer.chained_optimizers) > 1 and not optimizer.grads_states_parallel_group_is_shared()
    counts = optimizer.config.log_num_zeros_in_grad
    return logged and not _scales_loss(optimizer) and not several and not counts


def meetings(chunks: Sequence[Any], optimizer: Any, config: Any, norm_is_late: bool) -> tuple[str, ...]:
    """Return what makes the pipeline's ranks meet between steps, as far as the settings say."""
    timers, clip_grad = config.timers, _clip_grad(optimizer)
    limit = max(clip_grad, default=0.0)
    found = {
        f"clip_grad {limit:g}": limit > 0.0,
        "the norm of all gradients, for the log": bool(clip_grad) and not norm_is_late and not limit,
        "the overflow check of fp16": _scales_loss(optimizer),
        "tied embeddings": any(
            getattr(innermost(chunk), "share_embeddings_and_output_weights", False) for chunk in chunks
        ),
        "the number of tokens (calculate_per_token_loss)": config.calculate_per_token_loss,
        "barriers of the timers (timing_log_level, barrier_with_L1_time)": timers is not None
        and config.barrier_with_L1_time
        and getattr(timers, "_log_level", 0) > 0,
    }
    return tuple(reason for reason, holds in found.items() if holds)


def agreed_statistics(loop: Loop, agree: Callable[[], bool]) -> None:
    """Let a training loop skip reductions of statistics while ``agree()`` says that all ranks have the same ones.

    ``loop`` is one of ``megatron_patches.reductions``. ``agree`` must say the same on all ranks.
    """

    def successful(run: Callable[[], bool], own: Any) -> bool:
        return own is True if agree() else run()

    def largest(run: Callable[[], Any], own: Any) -> Any:
        if own is None or not agree():
            return run()
        return own if isinstance(own, LateTensor) else float(torch.tensor(own, dtype=torch.float32))

    megatron_patches.reductions.apply(loop, successful, largest)


@torch.no_grad()
def own_norm(optimizers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return the norm of this rank's gradients, from the host's own kernel. It counts shared parameters once."""
    gradients = [grad for optimizer in optimizers for grad in optimizer.get_main_grads_for_grad_norm()]
    if not gradients:
        return torch.zeros((), device=device)
    overflow = torch.zeros(1, dtype=torch.int, device=device)
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
    return norm.reshape(())  # type: ignore[no-any-return]


def _scales_loss(optimizer: Any) -> bool:
    return any(getattr(leaf, "grad_scaler", None) is not None for leaf in leaves(optimizer))


def _clip_grad(optimizer: Any) -> list[float]:
    configs = [getattr(leaf, "config", None) for leaf in leaves(optimizer)]
    return [float(config.clip_grad) for config in configs if config is not None]
