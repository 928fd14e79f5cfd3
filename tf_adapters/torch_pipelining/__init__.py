"""TimelyFreeze for torch.distributed.pipelining: one line before the first training step.

``tf_adapters.torch_pipelining.attach(schedule, config, optimizer=optimizer)`` with any schedule object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tf_adapters.config import TimelyFreezeConfig

if TYPE_CHECKING:
    import torch

    from tf_adapters.report.observer import MetricSink
    from tf_adapters.torch_pipelining.adapter import TorchPipeliningAdapter

__all__ = ["attach"]


def attach(
    schedule: Any,
    config: TimelyFreezeConfig | Mapping[str, Any] | None = None,
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
    from tf_adapters.torch_pipelining.entry import attach as attach_schedule

    return attach_schedule(schedule, config, optimizer, metrics=metrics, warmup_steps=warmup_steps)
