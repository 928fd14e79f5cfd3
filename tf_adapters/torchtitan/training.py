"""Freezing in TorchTitan's trainer: from the schedule that it has built to its checkpoints and logs.

Source: torchtitan/train.py (0.2) and torchtitan/trainer.py (0.3), torchtitan/components/checkpoint.py,
torchtitan/components/metrics.py.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

from tf_adapters.collectives import on_one_rank
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.hosts.support import missing_name, refuse
from tf_adapters.log import announce
from tf_adapters.overrides import Overrides
from tf_adapters.torch_pipelining.entry import attach

__all__ = ["Installed", "install", "trainer_module"]

_TRAINER = ("train",)
_BUILT = ("checkpointer", "metrics_processor", "optimizers", "parallel_dims", "step")
_CHECKPOINTER = ("enable", "load")
_LOADING = ("_create_checkpoint_id", "_find_load_step", "exclude_from_loading", "folder", "states")
_METRICS = ("log", "should_log")

Settings = Callable[[str], TimelyFreezeConfig | None]
"""Gives the settings, None where freezing is off; called with the job's own folder, where reports go by default."""


class Installed:
    """What ``install`` changed. ``adapter`` is there while a trainer trains; ``revert()`` gives TorchTitan back."""

    def __init__(self, settings: TimelyFreezeConfig | Settings) -> None:
        self.settings = settings
        self.adapter: Any = None
        self._overrides = Overrides()

    def revert(self) -> None:
        """Detach, if attached, and let trainers train alone again. Call it on all ranks, between two steps."""
        if self.adapter is not None:
            self.adapter.detach()
            self.adapter = None
        self._overrides.restore()

    def install(self, trainer: Any) -> None:
        refuse(missing_name(trainer, _TRAINER, called="torchtitan's Trainer"))
        given, run = self.settings, trainer.train
        settings: Settings = given if callable(given) else lambda _: given

        @functools.wraps(run)
        def train(trainer: Any) -> Any:
            self.adapter = _attach(trainer, settings)
            result = run(trainer)
            # Not after an error: other ranks may be gone. The process's end writes the last report then.
            if self.adapter is not None:
                self.adapter.detach()
                self.adapter = None
            return result

        setattr(train, SECTION, self)
        self._overrides.set(trainer, "train", train)


def install(settings: TimelyFreezeConfig | Mapping[str, Any] | Settings) -> Installed:
    """Freeze in the pipelines of every TorchTitan trainer of this process that begins to train from here on.

    Args:
        settings: the settings; or what gives them for a job's dump folder.

    Returns:
        A handle with ``adapter`` and ``revert()``. Installing twice returns the first one.

    Raises:
        ConfigError: a setting is wrong, or it is installed already with other ones.
        UnsupportedError: this TorchTitan lacks something, or, from ``train()``, freezing cannot be right in this job.
    """
    given = settings if callable(settings) else TimelyFreezeConfig.parse(settings)
    trainer = trainer_module().Trainer
    existing: Installed | None = getattr(getattr(trainer, "train", None), SECTION, None)
    if existing is None:
        existing = Installed(given)
        existing.install(trainer)
    elif existing.settings != given:
        raise ConfigError("timely_freeze is installed already, with other settings: revert() it first")
    return existing


def trainer_module() -> ModuleType:
    """The module that defines ``Trainer``: ``torchtitan.trainer``, before 0.3 ``torchtitan.train``."""
    for name in ("torchtitan.trainer", "torchtitan.train"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in ("torchtitan.trainer", "torchtitan"):
                raise
            continue
        if hasattr(module, "Trainer"):
            return module
    raise UnsupportedError("timely_freeze cannot run here: torchtitan.trainer.Trainer is missing")


def _attach(trainer: Any, settings: Settings) -> Any:
    """Attach to a trainer that is built, before it loads its checkpoint."""
    refuse(missing_name(trainer, _BUILT, called="torchtitan's Trainer"))
    job = getattr(trainer, "job_config", None) or trainer.config
    folder = job.job.dump_folder if hasattr(job, "job") else job.dump_folder
    config = settings(folder)
    if config is None:
        return None
    if not trainer.parallel_dims.pp_enabled:
        refuse("TorchTitan trains without a pipeline; set parallelism.pipeline_parallel_degree above 1")
    needed = (*_CHECKPOINTER, *(_LOADING if getattr(trainer.checkpointer, "enable", False) else ()))
    refuse(missing_name(trainer.checkpointer, needed, called="torchtitan's CheckpointManager"))
    refuse(missing_name(trainer.metrics_processor, _METRICS, called="torchtitan's MetricsProcessor"))
    figures: dict[str, float] = {}
    adapter = attach(
        trainer.pp_schedule,
        config,
        optimizer=list(trainer.optimizers.optimizers),
        metrics=_Figures(trainer, figures),
        warmup_steps=job.lr_scheduler.warmup_steps,
    )
    if adapter is not None:
        _log_with(trainer.metrics_processor, figures, adapter.overrides)
        if trainer.checkpointer.enable:
            _keep_in_checkpoints(trainer, adapter, job.lr_scheduler.warmup_steps)
    return adapter


class _Figures:
    """Keeps the figures of a step that TorchTitan logs."""

    def __init__(self, trainer: Any, figures: dict[str, float]) -> None:
        self._trainer, self._figures = trainer, figures

    def due(self) -> bool:
        return bool(self._trainer.metrics_processor.should_log(self._trainer.step))

    def __call__(self, figures: Mapping[str, float]) -> None:
        self._figures.update({f"{SECTION}/{name}": value for name, value in figures.items()})


def _log_with(processor: Any, figures: Mapping[str, float], overrides: Overrides) -> None:
    run = processor.log

    @functools.wraps(run)
    def log(*args: Any, extra_metrics: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        return run(*args, extra_metrics={**(extra_metrics or {}), **figures}, **kwargs)

    overrides.set(processor, "log", log)


def _keep_in_checkpoints(trainer: Any, adapter: Any, warmup_steps: int) -> None:
    """Save with the trainer's states and load with them; a checkpoint without ours begins freezing anew."""
    checkpointer = trainer.checkpointer
    checkpointer.states[SECTION] = adapter
    adapter.on_detach(lambda: checkpointer.states.pop(SECTION, None))
    run = checkpointer.load

    @functools.wraps(run)
    def load(step: int = -1) -> Any:
        excluded = checkpointer.exclude_from_loading
        absent = not on_one_rank(adapter.collectives, lambda: _holds_state(checkpointer, step))
        if absent:
            checkpointer.exclude_from_loading = [*excluded, SECTION]
        try:
            loaded = run(step)
        finally:
            checkpointer.exclude_from_loading = excluded
        if loaded and absent:
            rank = adapter.collectives.rank
            announce(rank, "the checkpoint was saved without freezing: it begins anew", logging.WARNING)
            adapter.controller.load_state_dict(None, max(0, warmup_steps - trainer.step))
        return loaded

    adapter.overrides.set(checkpointer, "load", load)


def _holds_state(checkpointer: Any, step: int) -> bool:
    """Whether the checkpoint that would be loaded has a state of ours."""
    if not Path(checkpointer.folder).is_dir():
        return False
    number = checkpointer._find_load_step() if step == -1 else step
    path = Path(checkpointer._create_checkpoint_id(number))
    if number == -1 or not (path / ".metadata").is_file():
        return False
    return f"{SECTION}.{SECTION}" in FileSystemReader(path).read_metadata().state_dict_metadata
