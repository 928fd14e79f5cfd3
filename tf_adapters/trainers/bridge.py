"""Freezing in Megatron-Bridge's ``pretrain`` and ``finetune``, as one of their callbacks.

Source: megatron/bridge/training (callbacks.py, train.py, pretrain.py, state.py, checkpointing.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

import megatron_patches.reductions
import megatron_patches.train_state
from megatron_patches.patch import revert_all
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.hosts.agreement import GivenConfig
from tf_adapters.hosts.support import refuse
from tf_adapters.megatron.entry import attach, patch_schedules
from tf_adapters.megatron.late_norm import agreed_statistics
from tf_adapters.megatron.patching import patching
from tf_adapters.trainers.run import TrainerRun
from tf_adapters.training.phases import warmup_left

_newest: TimelyFreezeCallback | None = None  # whose run trains, or has trained last


class TimelyFreezeCallback(TrainerRun):
    """A callback of Megatron-Bridge that freezes: ``pretrain(..., callbacks=[TimelyFreezeCallback({...})])``.

    Make it before ``pretrain`` or ``finetune`` is called, since Bridge fetches Megatron's schedule before it starts its
    callbacks. It attaches when training starts, and resumes from the state in the loaded checkpoint. It adds its state
    to every checkpoint, writes figures to Bridge's loggers, and detaches at the end of training.

    ``config`` are the settings, equal on all ranks; by default all defaults. Raises ConfigError if a setting is wrong,
    and UnsupportedError if Megatron-Core or Megatron-Bridge lacks a symbol. The start of training raises
    UnsupportedError, on all ranks, if freezing cannot be right with this model.
    """

    prefix = "timely-freeze/"

    def __init__(self, config: GivenConfig = None) -> None:
        super().__init__()
        self._settings = TimelyFreezeConfig.parse(config)
        self._state: Any = None  # Bridge's GlobalState of the run
        self._last: str | None = None  # our state at the end of training
        if self._settings.enabled:
            with patching(), ExitStack() as undo:
                undo.callback(patch_schedules())
                megatron_patches.train_state.apply(SECTION, _to_save)
                undo.callback(partial(revert_all, megatron_patches.train_state.PATCHES))
                agreed_statistics(megatron_patches.reductions.BRIDGE, _statistics_agree)
                undo.pop_all()

    def on_train_start(self, context: Any) -> None:
        """Attach. Called by Bridge on all ranks."""
        global _newest
        self._state, self._last, _newest = context.state, None, self
        configured, progress = context.state.cfg, context.state.train_state
        if self._settings.enabled and getattr(configured.dist, "use_decentralized_pg", False):
            refuse("dist.use_decentralized_pg is True, and the ranks' places are read from Megatron's parallel_state")
        self.begin(
            partial(attach, context.model, context.optimizer, self._settings),
            warmup_left(context.scheduler, configured.train.global_batch_size),
            (lambda: bytes(getattr(progress, SECTION).tolist())) if progress.step > 0 else None,
        )

    def on_train_end(self, context: Any) -> None:
        """Detach. Called by Bridge on all ranks."""
        self._last = self.state_text()  # older versions save once more
        self.end()

    def due(self) -> bool:
        """Return whether Bridge writes after the step that has ended."""
        if self._iteration % self._state.cfg.logger.tensorboard_log_interval:
            return False
        return any(self._logger(name) for name in ("tensorboard", "wandb", "mlflow", "comet"))

    def __call__(self, figures: Mapping[str, float]) -> None:
        """Write figures to Bridge's loggers, which live on the last rank. Called on every rank after ``due`` steps."""
        super().__call__(figures)
        if tensorboard := self._logger("tensorboard"):
            for name, value in self.figures.items():
                tensorboard.add_scalar(name, value, self._iteration)
        if wandb := self._logger("wandb"):
            wandb.log(self.figures, self._iteration)
        if mlflow := self._logger("mlflow"):
            renamed = {name.replace("/", "_"): value for name, value in self.figures.items()}
            mlflow.log_metrics(renamed, step=self._iteration)
        if comet := self._logger("comet"):
            comet.log_metrics(self.figures, step=self._iteration)

    def _logger(self, name: str) -> Any:
        """Return a logger; None if it is not configured, lives on another rank, or is unknown to this version."""
        return getattr(self._state, f"{name}_logger", None)

    @property
    def _iteration(self) -> int:
        """Return the number of the current iteration, from 1. Bridge counts the finished ones."""
        return int(self._state.train_state.step) + 1


def _statistics_agree() -> bool:
    """Return whether all ranks of the run have the same statistics of a step. The answer is equal on all ranks."""
    return _newest is not None and _newest.adapter is not None and _newest.adapter.statistics_agree


def _to_save(train_state: Any) -> torch.Tensor | None:
    """Return our state as the bytes of its JSON, since a TrainState's entries are tensors; None for other runs'."""
    if _newest is None or train_state is not _newest._state.train_state:
        return None
    text = _newest.state_text() or _newest._last
    return None if text is None else torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
