"""Freezing in ms-swift's Megatron trainers (Megatron-SWIFT), as one of their callbacks.

In a plugin file ``from tf_adapters.trainers.swift import register`` and ``register({...})``; on the command line
``--external_plugins plugin.py --callbacks timely_freeze``. Source: swift/megatron (callbacks/base.py,
trainers/base.py, utils/megatron_lm_utils.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback

from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.hosts.agreement import GivenConfig
from tf_adapters.hosts.support import missing_name, refuse
from tf_adapters.megatron.entry import attach
from tf_adapters.trainers.run import TrainerRun, read_state
from tf_adapters.training.phases import warmup_left

_TRAINER = ("args", "opt_param_scheduler", "optimizer", "state", "wrapped_models")


def register(config: GivenConfig = None) -> None:
    """Let ``--callbacks timely_freeze`` freeze with these settings; by default all defaults.

    Raises ConfigError if a setting is wrong, on every rank and before a model is built.
    """
    settings = TimelyFreezeConfig.parse(config)
    megatron_callbacks_map[SECTION] = lambda trainer: TimelyFreezeCallback(trainer, settings)


class TimelyFreezeCallback(TrainerRun, MegatronCallback):  # type: ignore[misc]
    """A callback of one of ms-swift's Megatron trainers, which makes it after a call of ``register``.

    It attaches when training begins, and resumes from the state in the folder of the loaded weights. It writes its
    state into every checkpoint (``checkpoint-N/timely_freeze.json``), and adds figures to ms-swift's logs. It detaches
    at the end of training.
    """

    def __init__(self, trainer: Any, settings: TimelyFreezeConfig) -> None:
        TrainerRun.__init__(self)
        MegatronCallback.__init__(self, trainer)
        self._settings = settings

    def on_train_begin(self) -> None:
        """Attach. Called by ms-swift on all ranks. Raises UnsupportedError on all, if freezing cannot be right."""
        trainer, args = self.trainer, self.args
        refuse(missing_name(trainer, _TRAINER))
        given = trainer.wrapped_models, trainer.optimizer, self._settings.reporting_in(args.output_dir)
        self.begin(
            partial(attach, *given, num_microbatches=args.num_microbatches),
            warmup_left(trainer.opt_param_scheduler, args.global_batch_size),
            (lambda: read_state(_loaded_from(args))) if self.state.iteration > 0 else None,
        )

    def on_log(self, logs: dict[str, Any]) -> None:
        """Add our figures, except to an evaluation's, before the callbacks that print and write them."""
        if not any(name.startswith("eval_") for name in logs):
            logs.update(self.figures)

    def on_save(self, output_dir: str) -> None:
        """Write our state into the checkpoint that was saved."""
        self.write_state(output_dir)

    def on_train_end(self) -> None:
        """Detach. Called by ms-swift on all ranks."""
        self.end()


def _loaded_from(args: Any) -> str:
    """Return the folder of the checkpoint from which ms-swift resumes: Megatron's, or safetensors."""
    adapters = [] if args.tuner_type == "full" else list(args.adapters or ())
    return str(args.mcore_adapter or args.mcore_model or (adapters[0] if adapters else args.model))
