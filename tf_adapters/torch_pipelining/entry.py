"""Deciding, on all ranks together, whether and with which settings a schedule freezes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tf_adapters.collectives import ProcessGroupCollectives, on_all_ranks
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.hosts.adapter import attach_once
from tf_adapters.report.observer import MetricSink
from tf_adapters.torch_pipelining.adapter import ATTRIBUTE, TorchPipeliningAdapter, host_info
from tf_adapters.torch_pipelining.support import check
from tf_adapters.training.phases import DEFAULT_WARMUP_STEPS

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def attach(
    schedule: Any,
    config: TimelyFreezeConfig | Mapping[str, Any] | None,
    optimizer: Optimizers,
    *,
    metrics: MetricSink | None,
    warmup_steps: int | None,
) -> TorchPipeliningAdapter | None:
    """See ``tf_adapters.torch_pipelining.attach``."""
    optimizers = _as_tuple(optimizer)
    collectives = ProcessGroupCollectives()

    def make(settings: TimelyFreezeConfig) -> TorchPipeliningAdapter:
        _agree_on_the_step(on_all_ranks(collectives, lambda: bool(optimizers)))
        warmup = DEFAULT_WARMUP_STEPS if warmup_steps is None else warmup_steps
        return TorchPipeliningAdapter(schedule, settings, collectives, optimizers, metrics=metrics, warmup_steps=warmup)

    existing: TorchPipeliningAdapter | None = getattr(schedule, ATTRIBUTE, None)
    return attach_once(
        collectives=collectives,
        host=host_info(),
        existing=existing,
        given=config,
        read=lambda: _settings(schedule, config, optimizers),
        make=make,
    )


def _as_tuple(optimizer: Optimizers) -> tuple[Any, ...]:
    if optimizer is None:
        return ()
    return tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)


def _settings(
    schedule: Any, config: TimelyFreezeConfig | Mapping[str, Any] | None, optimizers: tuple[Any, ...]
) -> TimelyFreezeConfig:
    settings = TimelyFreezeConfig.parse(config)
    if settings.schedule != "host":
        raise ConfigError(
            f'timely_freeze.schedule is "{settings.schedule}": allowed is "host"; with torch.distributed.pipelining '
            "the schedule is the object that you pass"
        )
    if settings.enabled:
        check(schedule, optimizers)
    return settings


def _agree_on_the_step(given: list[bool]) -> None:
    """Raise ConfigError where some ranks end a step with their optimizer and others with the pipeline's."""
    if any(given) and not all(given):
        raise ConfigError(
            f"optimizer is given on rank {given.index(True)} but not on rank {given.index(False)}: "
            "give it on all ranks or on none"
        )
