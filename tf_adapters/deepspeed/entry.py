"""Deciding, on all ranks together, whether and with which settings an engine freezes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tf_adapters.collectives import ProcessGroupCollectives, on_all_ranks
from tf_adapters.config import TimelyFreezeConfig, find_section
from tf_adapters.deepspeed.adapter import ATTRIBUTE, DeepSpeedAdapter
from tf_adapters.deepspeed.support import check, warnings
from tf_adapters.log import announce


def attach(engine: Any, config: TimelyFreezeConfig | Mapping[str, Any] | None) -> DeepSpeedAdapter | None:
    """See ``tf_adapters.deepspeed.attach``."""
    existing: DeepSpeedAdapter | None = vars(engine).get(ATTRIBUTE)
    if existing is not None:
        return existing
    collectives = ProcessGroupCollectives()
    settings = on_all_ranks(collectives, lambda: _settings(engine, config))[collectives.rank]
    if settings is None or not settings.enabled:
        reason = 'the config has no "timely_freeze" section' if settings is None else '"enabled" is false'
        announce(collectives.rank, f"disabled: {reason}")
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
    return settings
