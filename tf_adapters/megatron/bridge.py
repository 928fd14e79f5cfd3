"""Freezing in Megatron-Bridge's ``pretrain`` and ``finetune``, as one of their callbacks.

Source: megatron/bridge/training (callbacks.py, train.py, checkpointing.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.hosts.agreement import GivenConfig
from tf_adapters.log import announce
from tf_adapters.megatron.adapter import MegatronAdapter
from tf_adapters.megatron.entry import attach, patch_schedules
from tf_adapters.megatron.training import warmup_left
from tf_adapters.overrides import Overrides

__all__ = ["TimelyFreezeCallback"]

STATE_FILE = f"{SECTION}.json"
"""In a checkpoint's folder."""


class TimelyFreezeCallback:
    """A callback of Megatron-Bridge that freezes: ``pretrain(..., callbacks=[TimelyFreezeCallback({...})])``.

    Make it before ``pretrain`` is called: Bridge fetches Megatron's schedule before it starts its callbacks. It attaches
    when training starts, goes on from the state in the checkpoint that was loaded, leaves its state in every global
    checkpoint (``iter_.../timely_freeze.json``), writes figures to Bridge's TensorBoard and W&B, and detaches at the
    end of training. It needs nothing of Bridge's to be imported.

    Args:
        config: the settings; by default all defaults. Equal on all ranks.

    Attributes:
        adapter: while training runs; None before, after, and where ``enabled`` is false.

    Raises:
        ConfigError: a setting is wrong. UnsupportedError: this version of Megatron-Core has not what it needs; raised
            at the start of training, on all ranks, where freezing cannot be right with this model.
    """

    def __init__(self, config: GivenConfig = None) -> None:
        self.adapter: MegatronAdapter | None = None
        self._settings = TimelyFreezeConfig.parse(config)
        self._state: Any = None  # Bridge's, of the run
        self._last: dict[str, Any] | None = None  # ours, once training has ended
        self._overrides = Overrides()
        patch_schedules()

    def on_train_start(self, context: Any) -> None:
        """Attach; called by Bridge on all ranks."""
        self._state, self._last = context.state, None
        self._watch_checkpoints()
        configured, step = context.state.cfg, context.state.train_state.step
        warmup = warmup_left(context.scheduler, configured.train.global_batch_size)
        logs = BridgeLogs(context.state)
        self.adapter = attach(context.model, context.optimizer, self._settings, warmup_steps=warmup, metrics=logs)
        if self.adapter is not None and step > 0:
            self.adapter.controller.load_state_dict(_read(configured.checkpoint.load, step), warmup)

    def on_checkpoint_save(self, context: Any) -> None:
        """Leave our state beside the checkpoint that was saved; called by newer versions of Bridge."""
        self._save(context.state)

    def on_train_end(self, context: Any) -> None:
        """Leave the last report, and give the model back as it was; called by Bridge on all ranks."""
        if self.adapter is not None:
            self._last = self.adapter.controller.state_dict()  # Bridge may save once more
            self.adapter.detach()
            self.adapter = None

    def _watch_checkpoints(self) -> None:
        """Follow the saves of versions that have no event for them."""
        from megatron.bridge.training import callbacks, pretrain, train

        if "on_checkpoint_save" in callbacks.VALID_EVENTS:
            return
        for module in (train, pretrain):
            if getattr(module.save_checkpoint, "timely_freeze", None) is not self:
                self._overrides.set(module, "save_checkpoint", self._saving(module.save_checkpoint))

    def _saving(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def save_checkpoint(state: Any, *args: Any, **kwargs: Any) -> Any:
            result = run(state, *args, **kwargs)
            if state is self._state and not kwargs.get("non_persistent_ckpt", False):
                self._save(state)
            return result

        save_checkpoint.timely_freeze = self  # type: ignore[attr-defined]
        return save_checkpoint

    def _save(self, state: Any) -> None:
        """Write our state on rank 0; a disk that fails costs the state and not the run."""
        ours = self._last if self.adapter is None else self.adapter.controller.state_dict()
        if ours is None or dist.get_rank() != 0 or state.cfg.checkpoint.save is None:
            return
        path = _path(state.cfg.checkpoint.save, state.train_state.step)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(ours))
        except OSError as error:
            announce(0, f"the state cannot be saved in {path} ({error.strerror}): a resumed run monitors anew")


class BridgeLogs:
    """Figures to Bridge's writers, which live on the last rank, in its intervals."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def due(self) -> bool:
        """Whether Bridge writes after the step that has ended."""
        writes = bool(self._state.tensorboard_logger or self._state.wandb_logger)
        return writes and self._iteration % self._state.cfg.logger.tensorboard_log_interval == 0

    def __call__(self, figures: Mapping[str, float]) -> None:
        """Called on every rank after the steps that are ``due``."""
        named = {f"timely-freeze/{name}": value for name, value in figures.items()}
        if self._state.tensorboard_logger:
            for name, value in named.items():
                self._state.tensorboard_logger.add_scalar(name, value, self._iteration)
        if self._state.wandb_logger:
            self._state.wandb_logger.log(named, self._iteration)

    @property
    def _iteration(self) -> int:
        """Bridge counts the finished ones there."""
        return int(self._state.train_state.step) + 1


def _path(folder: str, step: int) -> Path:
    return Path(folder) / f"iter_{step:07d}" / STATE_FILE


def _read(folder: str | None, step: int) -> Any:
    """The state that a checkpoint has; None where it has none that can be read. Rank 0's counts."""
    if folder is None:
        return None
    try:
        return json.loads(_path(folder, step).read_text())
    except (OSError, ValueError):
        return None
