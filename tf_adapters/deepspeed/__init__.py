"""TimelyFreeze for DeepSpeed's pipeline engine.

Three ways in, the same result:

- ``deepspeed --module tf_adapters.deepspeed train.py --deepspeed_config ds_config.json``: the script unchanged;
- ``tf_adapters.deepspeed.attach(engine)``: one line after ``deepspeed.initialize``;
- ``tf_adapters.deepspeed.initialize(...)`` in the place of ``deepspeed.initialize(...)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tf_adapters.config import TimelyFreezeConfig

if TYPE_CHECKING:
    from tf_adapters.deepspeed.adapter import DeepSpeedAdapter
    from tf_adapters.report.observer import MetricSink

__all__ = ["attach", "initialize"]


def attach(
    engine: Any,
    config: TimelyFreezeConfig | Mapping[str, Any] | None = None,
    *,
    metrics: MetricSink | None = None,
    warmup_steps: int | None = None,
) -> DeepSpeedAdapter | None:
    """Freeze in this engine's training from here on. Call it on all ranks, before the first ``train_batch``.

    Args:
        engine: what ``deepspeed.initialize`` returned for a ``PipelineModule``.
        config: the settings; by default the ``timely_freeze`` section of the engine's JSON config.
        metrics: called on this rank after each step with named figures (ratios in [0, 1], ms).
        warmup_steps: what ``warmup_steps: "auto"`` stands for; by default what is left of the scheduler's warm-up.

    Returns:
        The adapter, with ``controller`` and ``detach()``; also to be had as ``engine.timely_freeze``. None where
        freezing is not asked for. Attaching twice returns the first adapter; with other
        settings it is refused.

    Raises:
        ConfigError: a setting is wrong. UnsupportedError: freezing cannot be right with this engine. On all ranks.
    """
    from tf_adapters.deepspeed.entry import attach as attach_engine

    return attach_engine(engine, config, metrics, warmup_steps)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize`` with the same arguments and result, followed by ``attach``."""
    import deepspeed

    result = deepspeed.initialize(*args, **kwargs)
    attach(result[0])
    return result
