"""Attach freezing to an engine: all ranks decide together whether, and with which settings."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import deepspeed

from tf_adapters.collectives import ProcessGroupCollectives
from tf_adapters.config import find_section
from tf_adapters.deepspeed.adapter import ATTRIBUTE, HOST, DeepSpeedAdapter
from tf_adapters.deepspeed.support import check, warnings
from tf_adapters.hosts.adapter import attach_once
from tf_adapters.hosts.agreement import GivenConfig
from tf_adapters.log import announce
from tf_adapters.report.observer import MetricSink

__all__ = ["attach", "attaching", "initialize"]


def attach(
    engine: Any,
    config: GivenConfig = None,
    *,
    metrics: MetricSink | None = None,
    warmup_steps: int | None = None,
) -> DeepSpeedAdapter | None:
    """Attach freezing to this engine. Call it on all ranks, before the first ``train_batch``.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned for a ``PipelineModule``.
        config: the settings; by default the ``timely_freeze`` section of the engine's JSON config.
        metrics: called on this rank after each step with named figures (ratios in [0, 1], ms).
        warmup_steps: the value of ``warmup_steps: "auto"``; by default the rest of the scheduler's warm-up.

    Returns:
        The adapter, with ``controller`` and ``detach()``, also available as ``engine.timely_freeze``. None if freezing
        is not enabled. A second call returns the same adapter, and is refused with other settings.

    Raises:
        ConfigError: a setting is wrong, on all ranks.
        UnsupportedError: freezing cannot be right with this engine, on all ranks.
    """
    existing: DeepSpeedAdapter | None = vars(engine).get(ATTRIBUTE)
    adapter = attach_once(
        connect=ProcessGroupCollectives,
        host=HOST,
        existing=existing,
        given=config,
        section=lambda: find_section(engine._config._param_dict),
        check=lambda settings: check(engine, settings),
        make=lambda collectives, settings: DeepSpeedAdapter(
            engine, settings, collectives, metrics=metrics, warmup_steps=warmup_steps
        ),
    )
    if adapter is not None and existing is None:
        for warning in warnings(engine):
            announce(adapter.collectives.rank, warning, logging.WARNING)
    return adapter


def attaching(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``deepspeed.initialize`` followed by ``attach``, with the same arguments and result."""

    @functools.wraps(initialize)
    def initialize_and_attach(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        attach(result[0])
        return result

    return initialize_and_attach


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize`` with the same arguments and result, followed by ``attach``."""
    return attaching(deepspeed.initialize)(*args, **kwargs)
