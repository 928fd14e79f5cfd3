"""Deciding, on all ranks together, whether and with which settings an engine freezes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tf_adapters.collectives import ProcessGroupCollectives, on_all_ranks
from tf_adapters.config import TimelyFreezeConfig, find_section
from tf_adapters.deepspeed.adapter import ATTRIBUTE, DeepSpeedAdapter
from tf_adapters.deepspeed.support import check, warnings
from tf_adapters.errors import ConfigError
from tf_adapters.log import announce


def attach(engine: Any, config: TimelyFreezeConfig | Mapping[str, Any] | None) -> DeepSpeedAdapter | None:
    """See ``tf_adapters.deepspeed.attach``."""
    existing: DeepSpeedAdapter | None = vars(engine).get(ATTRIBUTE)
    if existing is not None:
        return existing
    collectives = ProcessGroupCollectives()
    settings = _agreed(on_all_ranks(collectives, lambda: _settings(engine, config)))
    if settings is None or not settings.enabled:
        reason = 'the config has no "timely_freeze" section' if settings is None else '"enabled" is false'
        announce(collectives.rank, f"disabled: {reason}")
        return None
    adapter = DeepSpeedAdapter(engine, settings)
    adapter.controller.announce_start()
    for warning in warnings(engine):
        announce(collectives.rank, warning, logging.WARNING)
    return adapter


def _agreed(settings: list[TimelyFreezeConfig | None]) -> TimelyFreezeConfig | None:
    """What all ranks were given. Raises ConfigError on all of them where that differs."""
    different = next((rank for rank, given in enumerate(settings) if given != settings[0]), None)
    if different is None:
        return settings[0]
    raise ConfigError(
        f"the timely_freeze settings differ between ranks: rank 0 has {_shown(settings[0])}, "
        f"rank {different} has {_shown(settings[different])}; every rank needs the same"
    )


def _shown(settings: TimelyFreezeConfig | None) -> str:
    return "none" if settings is None else str(settings.model_dump(exclude_defaults=True))


def _settings(engine: Any, config: TimelyFreezeConfig | Mapping[str, Any] | None) -> TimelyFreezeConfig | None:
    if config is None:
        config = find_section(engine._config._param_dict)
        if config is None:
            return None
    settings = TimelyFreezeConfig.parse(config)
    if settings.enabled:
        check(engine)
    return settings
