"""Freezing in Megatron-Bridge's ``pretrain`` and ``finetune``, as one of their callbacks.

Source: megatron/bridge/training (callbacks.py, train.py, pretrain.py, state.py, checkpointing.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

import megatron_patches.train_state
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.errors import UnsupportedError
from tf_adapters.hosts.agreement import GivenConfig
from tf_adapters.hosts.support import refuse
from tf_adapters.log import announce
from tf_adapters.megatron.adapter import MegatronAdapter
from tf_adapters.megatron.entry import attach, patch_schedules
from tf_adapters.megatron.patching import patching
from tf_adapters.megatron.training import warmup_left

__all__ = ["TimelyFreezeCallback"]

_newest: TimelyFreezeCallback | None = None  # whose run trains, or has trained last


class TimelyFreezeCallback:
    """A callback of Megatron-Bridge that freezes: ``pretrain(..., callbacks=[TimelyFreezeCallback({...})])``.

    Make it before ``pretrain`` or ``finetune`` is called: Bridge fetches Megatron's schedule before it starts its
    callbacks. It attaches when training starts, goes on from the state in the checkpoint that was loaded, puts its
    state into every checkpoint, writes figures to Bridge's loggers, and detaches at the end of training.

    Args:
        config: the settings; by default all defaults. Equal on all ranks.

    Attributes:
        adapter: while training runs; None before and after, and where ``enabled`` is false.

    Raises:
        ConfigError: a setting is wrong. UnsupportedError: Megatron-Core or Megatron-Bridge lacks what it needs; raised
            at the start of training, on all ranks, where freezing cannot be right with this model.
    """

    def __init__(self, config: GivenConfig = None) -> None:
        self.adapter: MegatronAdapter | None = None
        self._settings = TimelyFreezeConfig.parse(config)
        self._progress: Any = None  # the TrainState of the run
        self._last: dict[str, Any] | None = None  # our state at the end of training
        if self._settings.enabled:
            with patching(), ExitStack() as undo:
                undo.callback(patch_schedules())
                megatron_patches.train_state.apply(SECTION, _to_save)
                undo.pop_all()

    def on_train_start(self, context: Any) -> None:
        """Attach; called by Bridge on all ranks."""
        global _newest
        configured, progress = context.state.cfg, context.state.train_state
        self.adapter, self._last = None, None  # of a run in this process that has failed
        self._progress, _newest = progress, self
        if self._settings.enabled:
            refuse(_problem(configured))
        warmup = warmup_left(context.scheduler, configured.train.global_batch_size)
        logs = BridgeLogs(context.state)
        adapter = attach(context.model, context.optimizer, self._settings, warmup_steps=warmup, metrics=logs)
        if adapter is not None and progress.step > 0:
            with adapter.abandoned_on_error():
                adapter.controller.load_state_dict(_decoded(getattr(progress, SECTION, None)), warmup)
        self.adapter = adapter

    def on_train_end(self, context: Any) -> None:
        """Leave the last report, and give the model back as it was; called by Bridge on all ranks."""
        if self.adapter is None:
            return
        self._last = self.adapter.controller.state_dict()  # older versions save once more
        try:
            self.adapter.detach()
        except UnsupportedError as error:  # other code has wrapped ours: the end of training is no reason to fail
            announce(self.adapter.collectives.rank, str(error), logging.WARNING)
        self.adapter = None

    def state_of(self, train_state: Any) -> dict[str, Any] | None:
        """What a checkpoint of this run has to hold besides; None for other runs."""
        if train_state is not self._progress:
            return None
        return self._last if self.adapter is None else self.adapter.controller.state_dict()


class BridgeLogs:
    """Figures to Bridge's loggers, which live on the last rank, in its intervals."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def due(self) -> bool:
        """Whether Bridge writes after the step that has ended."""
        if self._iteration % self._state.cfg.logger.tensorboard_log_interval:
            return False
        return any(self._logger(name) for name in ("tensorboard", "wandb", "mlflow", "comet"))

    def __call__(self, figures: Mapping[str, float]) -> None:
        """Called on every rank after the steps that are ``due``."""
        named = {f"timely-freeze/{name}": value for name, value in figures.items()}
        tensorboard, wandb = self._logger("tensorboard"), self._logger("wandb")
        mlflow, comet = self._logger("mlflow"), self._logger("comet")
        if tensorboard:
            for name, value in named.items():
                tensorboard.add_scalar(name, value, self._iteration)
        if wandb:
            wandb.log(named, self._iteration)
        if mlflow:
            mlflow.log_metrics({name.replace("/", "_"): value for name, value in named.items()}, step=self._iteration)
        if comet:
            comet.log_metrics(named, step=self._iteration)

    def _logger(self, name: str) -> Any:
        """None where it is not configured, on other ranks, and where this version does not know it."""
        return getattr(self._state, f"{name}_logger", None)

    @property
    def _iteration(self) -> int:
        """Bridge counts the finished ones there."""
        return int(self._state.train_state.step) + 1


def _problem(configured: Any) -> str | None:
    if getattr(configured.dist, "use_decentralized_pg", False):
        return "dist.use_decentralized_pg is True, and the ranks' places are read from Megatron's parallel_state"
    return None


def _to_save(train_state: Any) -> torch.Tensor | None:
    """Our state as JSON, in bytes: a TrainState's entries are tensors."""
    state = None if _newest is None else _newest.state_of(train_state)
    return None if state is None else torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _decoded(saved: Any) -> Any:
    """None without a state that can be read. Rank 0's counts."""
    try:
        return None if saved is None else json.loads(bytes(saved.tolist()))
    except (AttributeError, TypeError, ValueError):
        return None
