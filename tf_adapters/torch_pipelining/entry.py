"""Deciding, on all ranks together, whether and with which settings a schedule freezes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tf_adapters.collectives import ProcessGroupCollectives, on_all_ranks
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.report.observer import MetricSink
from tf_adapters.torch_pipelining.adapter import ATTRIBUTE, TorchPipeliningAdapter
from tf_adapters.torch_pipelining.support import check
from tf_adapters.training.agreement import agree_on_settings

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def attach(
    schedule: Any,
    config: TimelyFreezeConfig | Mapping[str, Any] | None,
    optimizer: Optimizers,
    metrics: MetricSink | None,
) -> TorchPipeliningAdapter | None:
    """See ``tf_adapters.torch_pipelining.attach``."""
    existing: TorchPipeliningAdapter | None = getattr(schedule, ATTRIBUTE, None)
    if existing is not None:
        return existing
    optimizers = _as_tuple(optimizer)
    collectives = ProcessGroupCollectives()
    settings = agree_on_settings(collectives, lambda: _settings(schedule, config, optimizers))
    if settings is None:
        return None
    _agree_on_the_step(on_all_ranks(collectives, lambda: bool(optimizers)))
    adapter = TorchPipeliningAdapter(schedule, settings, optimizers, metrics)
    adapter.controller.announce_start()
    return adapter


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
