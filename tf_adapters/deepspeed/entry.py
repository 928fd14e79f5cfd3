"""Deciding, on all ranks together, whether and with which settings an engine freezes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tf_adapters.collectives import ProcessGroupCollectives
from tf_adapters.config import TimelyFreezeConfig, find_section
from tf_adapters.deepspeed.adapter import ATTRIBUTE, DeepSpeedAdapter
from tf_adapters.deepspeed.stages import is_dualpipev
from tf_adapters.deepspeed.support import check, warnings
from tf_adapters.errors import ConfigError
from tf_adapters.log import announce
from tf_adapters.training.agreement import agree_on_settings


def attach(engine: Any, config: TimelyFreezeConfig | Mapping[str, Any] | None) -> DeepSpeedAdapter | None:
    """See ``tf_adapters.deepspeed.attach``."""
    existing: DeepSpeedAdapter | None = vars(engine).get(ATTRIBUTE)
    if existing is not None:
        return existing
    collectives = ProcessGroupCollectives()
    settings = agree_on_settings(collectives, lambda: _settings(engine, config))
    if settings is None:
        return None
    adapter = DeepSpeedAdapter(engine, settings)
    adapter.controller.announce_start()
    for warning in warnings(engine):
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
