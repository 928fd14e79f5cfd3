"""TimelyFreeze for TorchTitan jobs: ``torchrun ... -m tf_adapters.trainers.torchtitan ... --timely_freeze.enable``.

The pipeline is torch.distributed.pipelining's, so freezing is that host's; here are TorchTitan's command line,
checkpoints and logs. A script of your own calls ``install(settings)`` before it trains. Source: torchtitan/train.py
(0.2) and torchtitan/trainer.py (0.3), torchtitan/components/checkpoint.py, torchtitan/components/metrics.py.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

from tf_adapters.collectives import on_all_ranks, on_one_rank
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.hosts.launcher import errors_in_one_line
from tf_adapters.hosts.support import missing_name, refuse
from tf_adapters.log import announce
from tf_adapters.overrides import Overrides
from tf_adapters.torch_pipelining.entry import attach
from tf_adapters.trainers.run import TrainerRun
from tf_adapters.trainers.torchtitan_norm import meetings, replace_norm
from tf_adapters.trainers.torchtitan_settings import JobSettings

_BUILT = ("checkpointer", "metrics_processor", "optimizers", "parallel_dims", "step")
_CHECKPOINTER = ("enable", "load")
_LOADING = ("_create_checkpoint_id", "_find_load_step", "exclude_from_loading", "folder", "states")
_METRICS = ("log", "should_log")
_USAGE = (
    "usage: torchrun [...] -m tf_adapters.trainers.torchtitan [-m MODULE] [TorchTitan's arguments] "
    "--timely_freeze.enable [--timely_freeze.max_freeze_ratio 0.8 ...]\nMODULE is torchtitan.train by default."
)

Settings = Callable[[str], TimelyFreezeConfig | None]
"""Called with the job's folder, where reports go by default. Returns the settings; None if freezing is off."""


class Installed(TrainerRun):
    """The handle that ``install`` returns. ``adapter`` exists while a trainer trains, and ``revert()`` detaches it."""

    def __init__(self, settings: TimelyFreezeConfig | Settings) -> None:
        super().__init__()
        self.settings = settings
        self._trainer: Any = None
        self._overrides = Overrides()

    def install(self, trainer: Any) -> None:
        refuse(missing_name(trainer, ("train",), called="torchtitan's Trainer"))
        self._overrides.wrap(trainer, "train", self._train)
        setattr(trainer.train, SECTION, self)

    def _train(self, run: Callable[[Any], Any], trainer: Any) -> Any:
        self._begin(trainer)
        result = run(trainer)
        self.end()
        return result

    def revert(self) -> None:
        """Detach, if attached, and restore TorchTitan's Trainer. Call it on all ranks, between two steps."""
        self.detach()
        self._overrides.restore()

    def due(self) -> bool:
        return bool(self._trainer.metrics_processor.should_log(self._trainer.step))

    def _begin(self, trainer: Any) -> None:
        """Attach to a complete trainer, before it loads its checkpoint."""
        refuse(missing_name(trainer, _BUILT, called="torchtitan's Trainer"))
        job = getattr(trainer, "job_config", None) or trainer.config
        folder = job.job.dump_folder if hasattr(job, "job") else job.dump_folder
        settings = self.settings(folder) if callable(self.settings) else self.settings
        if settings is None:
            return
        if not trainer.parallel_dims.pp_enabled:
            refuse("TorchTitan trains without a pipeline; set parallelism.pipeline_parallel_degree above 1")
        saves = getattr(trainer.checkpointer, "enable", False)
        needed = (*_CHECKPOINTER, *(_LOADING if saves else ()))
        refuse(missing_name(trainer.checkpointer, needed, called="torchtitan's CheckpointManager"))
        refuse(missing_name(trainer.metrics_processor, _METRICS, called="torchtitan's MetricsProcessor"))
        self._trainer, warmup = trainer, job.lr_scheduler.warmup_steps
        optimizers = list(trainer.optimizers.optimizers)
        reasons = meetings(job)
        begin = functools.partial(attach, trainer.pp_schedule, settings, optimizer=optimizers, meetings=reasons)
        self.begin(begin, warmup)
        if self.adapter is not None:
            if settings.defers:
                with self.adapter.abandoned_on_error():
                    on_all_ranks(self.adapter.collectives, lambda: replace_norm(self.adapter, trainer, job))
            self.adapter.overrides.wrap(trainer.metrics_processor, "log", self._log)
            if saves:
                _keep_in_checkpoints(trainer, self.adapter, warmup)

    def _log(
        self, run: Callable[..., Any], *args: Any, extra_metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        return run(*args, extra_metrics={**(extra_metrics or {}), **self.figures}, **kwargs)


def install(settings: TimelyFreezeConfig | Mapping[str, Any] | Settings) -> Installed:
    """Freeze in the pipeline of every TorchTitan trainer of this process that starts to train after this call.

    Args:
        settings: the settings, or a function that returns them for a job's dump folder.

    Returns:
        A handle with ``adapter`` and ``revert()``. A second call returns the same handle.

    Raises:
        ConfigError: a setting is wrong, or differs from those of an earlier call.
        UnsupportedError: this TorchTitan lacks a symbol, or, from ``train()``, freezing cannot be right in this job.
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
    """Return the module that defines ``Trainer``: ``torchtitan.trainer``, or before 0.3 ``torchtitan.train``."""
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


def _keep_in_checkpoints(trainer: Any, adapter: Any, warmup_steps: int) -> None:
    """Save our state with the trainer's, and load it with them. Without it in the checkpoint, freezing starts anew."""
    checkpointer = trainer.checkpointer
    checkpointer.states[SECTION] = adapter
    adapter.on_detach(lambda: checkpointer.states.pop(SECTION, None))

    def load(run: Callable[[int], Any], step: int = -1) -> Any:
        if on_one_rank(adapter.collectives, lambda: _holds_state(checkpointer, step)):
            return run(step)
        with Overrides() as excluding:
            excluding.set(checkpointer, "exclude_from_loading", [*checkpointer.exclude_from_loading, SECTION])
            loaded = run(step)
        if loaded:
            rank = adapter.collectives.rank
            announce(rank, "the checkpoint was saved without freezing: it starts anew", logging.WARNING)
            adapter.controller.load_state_dict(None, max(0, warmup_steps - trainer.step))
        return loaded

    adapter.overrides.wrap(checkpointer, "load", load)


def _holds_state(checkpointer: Any, step: int) -> bool:
    """Return whether the checkpoint that would be loaded has a state of ours."""
    if not Path(checkpointer.folder).is_dir():
        return False
    number = checkpointer._find_load_step() if step == -1 else step
    path = Path(checkpointer._create_checkpoint_id(number))
    if number == -1 or not (path / ".metadata").is_file():
        return False
    return f"{SECTION}.{SECTION}" in FileSystemReader(path).read_metadata().state_dict_metadata


def main() -> None:
    """Run TorchTitan's training, or the module that ``-m`` names, as it would run by itself."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return
    module = "torchtitan.train"
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        module, arguments = arguments[1], arguments[2:]
    with errors_in_one_line("tf_adapters.trainers.torchtitan"):
        settings = JobSettings(arguments)
        sys.argv = [module, *settings.rest]  # before TorchTitan is imported: it reads them then
        trainer = _prepared(settings)
        if module != "torchtitan.train":
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return
        run = importlib.import_module(module).main
        run(*([trainer] if inspect.signature(run).parameters else []))


def _prepared(settings: JobSettings) -> type:
    """Return TorchTitan's ``Trainer``, changed to freeze with these settings and those of its job file."""
    try:
        from torchtitan.config import ConfigManager

        trainer: type = trainer_module().Trainer
    except ModuleNotFoundError as error:
        if error.name == "torchtitan":
            raise UnsupportedError("torchtitan is not installed: pip install torchtitan") from None
        raise UnsupportedError(
            f"torchtitan needs {error.name}, which is not installed (triton comes with PyTorch for GPUs; without one, "
            "start with -m tf_adapters.testing.torchtitan_on_cpu -m tf_adapters.trainers.torchtitan)"
        ) from None
    if hasattr(ConfigManager, "_maybe_load_toml"):  # before 0.3

        def load_toml(run: Callable[..., Any], manager: Any, arguments: list[str]) -> Any:
            values = run(manager, arguments)
            return values if values is None else settings.take_section(values)

        Overrides().wrap(ConfigManager, "_maybe_load_toml", load_toml)
    install(settings.config)
    return trainer


if __name__ == "__main__":
    main()
