"""Deciding, on all ranks together, whether and with which settings an engine freezes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tf_adapters.collectives import ProcessGroupCollectives
from tf_adapters.config import TimelyFreezeConfig, find_section
from tf_adapters.deepspeed.adapter import ATTRIBUTE, DeepSpeedAdapter, host_info
from tf_adapters.deepspeed.stages import is_dualpipev
from tf_adapters.deepspeed.support import check, warnings
from tf_adapters.errors import ConfigError
from tf_adapters.hosts.adapter import attach_once
from tf_adapters.log import announce
from tf_adapters.report.observer import MetricSink


def attach(
    engine: Any,
    config: TimelyFreezeConfig | Mapping[str, Any] | None,
    metrics: MetricSink | None = None,
    warmup_steps: int | None = None,
) -> DeepSpeedAdapter | None:
    """See ``tf_adapters.deepspeed.attach``."""
    existing: DeepSpeedAdapter | None = vars(engine).get(ATTRIBUTE)
    collectives = ProcessGroupCollectives()
    adapter = attach_once(
        collectives=collectives,
        host=host_info(),
        existing=existing,
        given=config,
        read=lambda: _settings(engine, config),
        make=lambda settings: DeepSpeedAdapter(
            engine, settings, collectives, metrics=metrics, warmup_steps=warmup_steps
        ),
    )
    for warning in warnings(engine) if adapter is not None and existing is None else ():
        announce(collectives.rank, warning, logging.WARNING)
    return adapter


def _settings(engine: Any, config: TimelyFreezeConfig | Mapping[str, Any] | None) -> TimelyFreezeConfig | None:
    if config is None:
        config = find_section(engine._config._param_dict)
        if config is None:
            return None
    settings = TimelyFreezeConfig.parse(config)
    if settings.enabled:
        check(engine)
        if settings.schedule != "host" and is_dualpipev(engine):
            raise ConfigError(
                f'timely_freeze.schedule is "{settings.schedule}": DeepSpeed\'s DualPipeV engine runs its own; '
                'allowed is "host"'
            )
    return settings
