"""Attach freezing to a schedule: all ranks decide together whether, and with which settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tf_adapters.collectives import Collectives, ProcessGroupCollectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.hosts.adapter import attach_once
from tf_adapters.hosts.agreement import GivenConfig, refuse_other_schedules, refuse_v, same_on_all_ranks
from tf_adapters.report.observer import MetricSink
from tf_adapters.torch_pipelining.adapter import ATTRIBUTE, HOST, TorchPipeliningAdapter
from tf_adapters.torch_pipelining.support import check, check_split_backwards

__all__ = ["attach"]


def attach(
    schedule: Any,
    config: GivenConfig = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    metrics: MetricSink | None = None,
    warmup_steps: int | None = None,
    meetings: Sequence[str] = (),
) -> TorchPipeliningAdapter | None:
    """Attach freezing to this schedule. Call it on all ranks, before the first training step.

    Args:
        schedule: a schedule of torch.distributed.pipelining, made with a ``loss_fn``.
        config: the settings; by default all defaults.
        optimizer: the optimizer of this rank's stages, one or several. A step ends when all of them have stepped, so
            several ``schedule.step()`` calls may accumulate gradients for one update. Without it every
            ``schedule.step()`` is a step.
        metrics: called on this rank after each step with named figures (ratios in [0, 1], ms).
        warmup_steps: the value of ``warmup_steps: "auto"``: the length of the learning-rate warm-up; by default 10.
        meetings: what makes all ranks wait for each other between steps, for the log, if the caller knows.

    Returns:
        The adapter, with ``controller``, ``detach()``, ``state_dict()`` and ``load_state_dict()``, also available as
        ``schedule.timely_freeze``. None if ``enabled`` is false. A second call returns the same adapter, and is refused
        with other settings.

    Raises:
        ConfigError: a setting is wrong, on all ranks.
        UnsupportedError: freezing cannot be right with this schedule, on all ranks.
    """
    several = () if optimizer is None else optimizer
    optimizers: tuple[Any, ...] = tuple(several) if isinstance(several, (list, tuple)) else (several,)

    def make(collectives: Collectives, settings: TimelyFreezeConfig) -> TorchPipeliningAdapter:
        same_on_all_ranks(collectives, "optimizers", lambda: "some" if optimizers else "none", shown=str)
        return TorchPipeliningAdapter(
            schedule, settings, collectives, optimizers, metrics=metrics, warmup_steps=warmup_steps, meetings=meetings
        )

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
    refuse_v(settings, "build a ScheduleZBVZeroBubble, on which the plan's order runs")
    check(schedule, optimizers, settings)
    if settings.splits_backwards:
        check_split_backwards(schedule, settings.without_split)
