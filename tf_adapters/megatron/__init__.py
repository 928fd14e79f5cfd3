"""TimelyFreeze for Megatron-Core's pipeline schedules.

Three ways in, the same result:

- ``torchrun ... -m tf_adapters.megatron pretrain_gpt.py ... --timely-freeze``: a Megatron-LM script, unchanged;
- ``tf_adapters.megatron.install()`` in such a script, before it parses its arguments;
- ``tf_adapters.megatron.attach(model_chunks, optimizer, config)`` for a training loop of your own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tf_adapters.arguments import add_arguments
from tf_adapters.config import TimelyFreezeConfig

if TYPE_CHECKING:
    import torch

    from tf_adapters.megatron.adapter import MegatronAdapter
    from tf_adapters.megatron.training import TrainingScript
    from tf_adapters.report.observer import MetricSink

__all__ = ["add_arguments", "attach", "install", "revert"]


def attach(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any,
    config: TimelyFreezeConfig | Mapping[str, Any] | None = None,
    *,
    num_microbatches: int | None = None,
    pp_group: Any = None,
    warmup_steps: int | None = None,
    metrics: MetricSink | None = None,
) -> MegatronAdapter | None:
    """Freeze in this model's training from here on. Call it on all ranks, before the first training batch.

    Args:
        model: the model chunks of this rank, as they are given to Megatron's forward-backward function.
        optimizer: what ``get_megatron_optimizer`` returned, or a torch optimizer.
        config: the settings; by default all defaults.
        num_microbatches: of a training batch; by default what Megatron's num_microbatches_calculator says.
        pp_group: the pipeline's process group; by default that of ``parallel_state``.
        warmup_steps: what ``warmup_steps: "auto"`` stands for: the length of the learning-rate warm-up; by default 10.
        metrics: called on this rank after each step with named figures (ratios in [0, 1], ms).

    Returns:
        The adapter, with ``controller`` and ``detach()``; None where ``enabled`` is false. Attaching twice returns
        the first adapter; with other settings it is refused.

    Raises:
        ConfigError: a setting is wrong. UnsupportedError: freezing cannot be right with this model. On all ranks.
    """
    from tf_adapters.megatron.entry import attach as attach_model

    return attach_model(
        model,
        optimizer,
        config,
        num_microbatches=num_microbatches,
        pp_group=pp_group,
        warmup_steps=warmup_steps,
        metrics=metrics,
    )


def install() -> TrainingScript:
    """Give a Megatron-LM script the ``--timely-freeze`` arguments, and freezing where they ask for it.

    Call it before the script parses its arguments; what was imported before does not matter. Calling it twice does
    nothing more. The handle that it returns has ``adapter`` and ``revert()``. Raises UnsupportedError where
    ``megatron.training`` cannot be imported or lacks a symbol.
    """
    from tf_adapters.megatron.training import TrainingScript

    script = TrainingScript()
    script.install()
    return script


def revert() -> None:
    """Take every patch of Megatron back. Detach the adapters first."""
    import megatron_patches

    megatron_patches.revert_all()
