"""Freezing in slime's Megatron actors: ``--custom-megatron-before-train-step-hook-path`` names ``before_train_step``.

Settings are the ``timely_freeze`` section of the file that ``--custom-config-path`` names.
Source: slime/backends/megatron_utils (model.py, checkpoint.py), slime/observability/logging_utils.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tf_adapters.collectives import on_one_rank
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.hosts.support import missing_name, refuse
from tf_adapters.megatron.adapter import MegatronAdapter
from tf_adapters.megatron.entry import attach
from tf_adapters.megatron.states import read_state, write_state
from tf_adapters.megatron.training import warmup_left
from tf_adapters.overrides import Overrides

__all__ = ["before_train_step", "detach"]

_STEP_KEY = "train/step"
_run: ActorRun | None = None  # of this process, which trains one model


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Attach before the first step that this process trains; slime calls it before every one, on all ranks.

    Raises:
        ConfigError: a setting is wrong. UnsupportedError: freezing cannot be right with this model. On all ranks.
    """
    global _run
    if _run is None or _run.model is not model[0]:
        detach()
        run = ActorRun(model[0])
        run.attach(args, model, optimizer, opt_param_scheduler)
        _run = run


def detach() -> None:
    """Leave the last report, and give slime and the model back as they were. Call it on all ranks, between steps."""
    global _run
    if _run is not None:
        _run.detach()
        _run = None


class ActorRun:
    """What was attached in this process. ``adapter`` is None where ``enabled`` is false."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.adapter: MegatronAdapter | None = None
        self._overrides = Overrides()
        self._figures: dict[str, float] = {}

    def attach(self, args: Any, model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        from slime.backends.megatron_utils import model as host

        refuse(missing_name(host, ("logging_utils", "save_checkpoint"), called=host.__name__))
        role = getattr(self.model, "role", "actor")
        warmup = warmup_left(scheduler, args.global_batch_size)
        settings = _settings(args, role)
        adapter = attach(list(model), optimizer, settings, warmup_steps=warmup, metrics=self._keep)
        if adapter is None:
            return
        found: list[Any] = []  # on rank 0, whose state counts

        def read() -> bool:
            found.append(read_state(_loaded_from(args)))
            return found[0] is not None

        with adapter.abandoned_on_error():
            if on_one_rank(adapter.collectives, read) and not args.finetune:
                adapter.controller.load_state_dict(found[0] if found else None, warmup)
        self.adapter = adapter
        self._overrides.set(host, "save_checkpoint", self._saving(args, host.save_checkpoint))
        self._overrides.set(host.logging_utils, "log", self._logging(role, host.logging_utils.log))

    def detach(self) -> None:
        if self.adapter is not None:
            self.adapter.detach()
            self.adapter = None
        self._overrides.restore()

    def _keep(self, figures: Mapping[str, float]) -> None:
        self._figures = dict(figures)

    def _saving(self, args: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def save_checkpoint(iteration: int, *given: Any, **named: Any) -> Any:
            result = run(iteration, *given, **named)
            if self.adapter is not None and dist.get_rank() == 0:
                write_state(_folder(args.save, iteration), self.adapter.controller.state_dict())
            return result

        return save_checkpoint

    def _logging(self, role: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Our figures with those of a training step, under its names."""
        prefix = "train/" if role == "actor" else f"train/{role}-"

        @functools.wraps(run)
        def log(args: Any, metrics: Mapping[str, Any], step_key: str) -> Any:
            ours = self._figures if step_key == _STEP_KEY else {}
            return run(args, {**metrics, **{f"{prefix}{SECTION}_{k}": v for k, v in ours.items()}}, step_key=step_key)

        return log


def _settings(args: Any, role: str) -> TimelyFreezeConfig:
    """By default all defaults, with reports in ``--save``; those of a critic are in a folder of their own."""
    settings = TimelyFreezeConfig.parse(getattr(args, SECTION, None)).reporting_in(args.save or ".")
    if role == "actor":
        return settings
    return settings.model_copy(update={"output_dir": str(Path(settings.output_dir) / role)})


def _folder(save: str, iteration: int) -> Path:
    return Path(save) / f"iter_{iteration:07d}"


def _loaded_from(args: Any) -> Path:
    """The folder of the checkpoint that this run has loaded; without a number of its own it has no state of ours."""
    load, step = Path(args.load), getattr(args, "ckpt_step", None)
    if step is not None:
        return _folder(args.load, step)
    try:
        return _folder(args.load, int((load / "latest_checkpointed_iteration.txt").read_text()))
    except (OSError, ValueError):  # none, or "release"
        return load
