"""Freezing in slime's Megatron actors: ``--custom-megatron-before-train-step-hook-path`` names ``before_train_step``.

Settings are the ``timely_freeze`` section of the file that ``--custom-config-path`` names.
Source: slime/backends/megatron_utils (model.py, checkpoint.py), slime/observability/logging_utils.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.hosts.support import missing_name, refuse
from tf_adapters.megatron.entry import attach
from tf_adapters.trainers.run import TrainerRun, read_state
from tf_adapters.training.phases import warmup_left

_STEP_KEY = "train/step"
_run: ActorRun | None = None  # of this process, which trains one model


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Attach before the first step of this process. Slime calls it before every step, on all ranks.

    Raises ConfigError, on all ranks, if a setting is wrong, and UnsupportedError if freezing cannot be right with this
    model.
    """
    global _run
    if _run is None or _run.model is not model[0]:
        detach()
        run = ActorRun(model[0], getattr(model[0], "role", "actor"))
        run.install(args, model, optimizer, opt_param_scheduler)
        _run = run


def detach() -> None:
    """Write the last report, and restore slime and the model. Call it on all ranks, between steps."""
    global _run
    if _run is not None:
        _run.detach()
        _run = None


class ActorRun(TrainerRun):
    """Freezing of the actor or critic of this process. Its figures are logged with slime's, at each step."""

    def __init__(self, model: Any, role: str) -> None:
        super().__init__()
        self.model, self._role = model, role
        self.prefix = f"train/{SECTION}_" if role == "actor" else f"train/{role}-{SECTION}_"

    def install(self, args: Any, model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        from slime.backends.megatron_utils import model as host

        refuse(missing_name(host, ("logging_utils", "save_checkpoint"), called=host.__name__))
        self.begin(
            functools.partial(attach, list(model), optimizer, self._settings(args)),
            warmup_left(scheduler, args.global_batch_size),
            None if args.finetune else lambda: read_state(_loaded_from(args)),
        )
        if self.adapter is not None:
            self._save_and_log(args, host)

    def _settings(self, args: Any) -> TimelyFreezeConfig:
        """Return the settings. Reports go to ``--save`` by default, and those of a critic to a subfolder."""
        settings = TimelyFreezeConfig.parse(getattr(args, SECTION, None)).reporting_in(args.save or ".")
        if self._role == "actor":
            return settings
        return settings.model_copy(update={"output_dir": str(Path(settings.output_dir) / self._role)})

    def _save_and_log(self, args: Any, host: Any) -> None:
        def save_checkpoint(run: Callable[..., Any], iteration: int, *given: Any, **named: Any) -> Any:
            result = run(iteration, *given, **named)
            self.write_state(_folder(args.save, iteration))
            return result

        def log(run: Callable[..., Any], args: Any, metrics: Mapping[str, Any], step_key: str) -> Any:
            ours = self.figures if step_key == _STEP_KEY else {}
            return run(args, {**metrics, **ours}, step_key=step_key)

        self.adapter.overrides.wrap(host, "save_checkpoint", save_checkpoint)
        self.adapter.overrides.wrap(host.logging_utils, "log", log)


def _folder(save: str, iteration: int) -> Path:
    return Path(save) / f"iter_{iteration:07d}"


def _loaded_from(args: Any) -> Path:
    """Return the folder of the loaded checkpoint. A checkpoint without a number has no state of ours."""
    load, step = Path(args.load), getattr(args, "ckpt_step", None)
    if step is not None:
        return _folder(args.load, step)
    try:
        return _folder(args.load, int((load / "latest_checkpointed_iteration.txt").read_text()))
    except (OSError, ValueError):  # none, or "release"
        return load
