"""Deciding, on all ranks together, whether and with which settings a schedule freezes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tf_adapters.collectives import Collectives, ProcessGroupCollectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.hosts.adapter import attach_once
from tf_adapters.hosts.agreement import GivenConfig, refuse_other_schedules, same_on_all_ranks
from tf_adapters.report.observer import MetricSink
from tf_adapters.torch_pipelining.adapter import ATTRIBUTE, HOST, TorchPipeliningAdapter
from tf_adapters.torch_pipelining.support import check, check_split_backwards
from tf_adapters.training.phases import DEFAULT_WARMUP_STEPS

__all__ = ["attach"]


def attach(
    schedule: Any,
    config: GivenConfig = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    metrics: MetricSink | None = None,
    warmup_steps: int | None = None,
) -> TorchPipeliningAdapter | None:
    """Freeze in this schedule's training from here on. Call it on all ranks, before the first training step.

    Args:
        schedule: a schedule of torch.distributed.pipelining, made with a ``loss_fn``.
        config: the settings; by default all defaults.
        optimizer: what updates this rank's stages, one or several. A step ends when all of them have stepped, so
            several ``schedule.step()`` calls may accumulate gradients for one update. Without it every
            ``schedule.step()`` is a step.
        metrics: called after each step, on each rank that passes it, with named figures (ratios in [0, 1], ms).
        warmup_steps: what ``warmup_steps: "auto"`` stands for: the length of the learning-rate warm-up; by default 10.

    Returns:
        The adapter, with ``controller``, ``detach()``, ``state_dict()`` and ``load_state_dict()``; also to be had as
        ``schedule.timely_freeze``. None where ``enabled`` is false. Attaching twice returns the first
        adapter; with other settings it is refused.

    Raises:
        ConfigError: a setting is wrong. UnsupportedError: freezing cannot be right here. On all ranks.
    """
    if optimizer is None:
        optimizers: tuple[Any, ...] = ()
    else:
        optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)

    def make(collectives: Collectives, settings: TimelyFreezeConfig) -> TorchPipeliningAdapter:
        same_on_all_ranks(collectives, "optimizers", lambda: "some" if optimizers else "none", shown=str)
        warmup = DEFAULT_WARMUP_STEPS if warmup_steps is None else warmup_steps
        return TorchPipeliningAdapter(schedule, settings, collectives, optimizers, metrics=metrics, warmup_steps=warmup)

    existing: TorchPipeliningAdapter | None = getattr(schedule, ATTRIBUTE, None)
    return attach_once(
        connect=ProcessGroupCollectives,
        host=HOST,
        existing=existing,
        given=config,
        check=lambda settings: _check(schedule, optimizers, settings),
        make=make,
    )


def _check(schedule: Any, optimizers: tuple[Any, ...], settings: TimelyFreezeConfig) -> None:
    refuse_other_schedules(settings, "with torch.distributed.pipelining the schedule is the object that you pass")
    check(schedule, optimizers, settings)
    if settings.splits_backwards:
        check_split_backwards(schedule, settings.without_split)
