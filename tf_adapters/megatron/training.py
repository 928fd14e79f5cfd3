"""Freezing in a Megatron-LM training script, from its arguments to its checkpoints and logs.

Source: megatron/training (the Megatron-LM repository; the megatron-core package does not have it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import megatron_patches.arguments
import megatron_patches.checkpointing
import megatron_patches.model_setup
import megatron_patches.reductions
import megatron_patches.validated_arguments
from megatron_patches.patch import PatchError
from tf_adapters.arguments import add_arguments, config_from_args
from tf_adapters.collectives import ProcessGroupCollectives, on_all_ranks
from tf_adapters.config import SECTION
from tf_adapters.megatron.adapter import TIMER, MegatronAdapter
from tf_adapters.megatron.entry import attach
from tf_adapters.megatron.late_norm import agreed_statistics
from tf_adapters.megatron.patching import patching
from tf_adapters.megatron.placed_script import place_arguments
from tf_adapters.training.phases import warmup_left

_SCRIPT_PATCHES = (
    megatron_patches.arguments,
    megatron_patches.model_setup,
    megatron_patches.checkpointing,
)


class TrainingScript:
    """One run of a Megatron-LM script. The patches of ``megatron.training`` call its methods.

    ``adapter`` is set when the script has set up its model, if its arguments enable freezing.
    """

    def __init__(self) -> None:
        self.adapter: MegatronAdapter | None = None
        self._loaded: Mapping[str, Any] | None = None

    @patching()
    def install(self) -> None:
        """Patch ``megatron.training``. Raises UnsupportedError, and patches nothing, if a symbol is missing."""
        for module in _SCRIPT_PATCHES:
            for patch in module.PATCHES:
                patch.check()
        megatron_patches.arguments.apply(add_arguments)
        with suppress(PatchError):  # without it a model is not built in a V, and attach says so
            megatron_patches.validated_arguments.apply(place_arguments)
        megatron_patches.model_setup.apply(self._attach)
        megatron_patches.checkpointing.apply(SECTION, self._state_to_save, self._keep)
        loop = megatron_patches.reductions.MEGATRON_LM
        agreed_statistics(loop, lambda: self.adapter is not None and self.adapter.statistics_agree)

    @patching()
    def revert(self) -> None:
        """Detach, if attached, and revert every patch of Megatron. Call it on all ranks, between two batches."""
        if self.adapter is not None:
            self.adapter.detach()
        self.adapter = self._loaded = None
        megatron_patches.revert_all()

    def _state_to_save(self) -> dict[str, Any] | None:
        return None if self.adapter is None else self.adapter.controller.state_dict()

    def _keep(self, state: Mapping[str, Any] | None) -> None:
        self._loaded = state

    def _attach(self, model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        from megatron.training import get_args

        args = get_args()
        with ExitStack() as undo:
            collectives = ProcessGroupCollectives()
            undo.callback(collectives.close)
            settings = on_all_ranks(collectives, lambda: config_from_args(args))[0]
            if settings is None or optimizer is None:  # not asked for, or an evaluation only (--skip-train)
                return
            warmup = warmup_left(scheduler, args.global_batch_size)
            logs = TrainingLogs(args)
            undo.pop_all()  # attaching closes them
        adapter = attach(list(model), optimizer, settings, warmup_steps=warmup, metrics=logs, collectives=collectives)
        if adapter is not None and args.iteration > 0:
            with adapter.abandoned_on_error():
                adapter.controller.load_state_dict(self._loaded, warmup)
        self.adapter, self._loaded = adapter, None


class TrainingLogs:
    """Sends figures to Megatron's writers on the last rank, and our time to its timers, at its log intervals."""

    def __init__(self, args: Any) -> None:
        from megatron.training import get_tensorboard_writer, get_timers, get_wandb_writer

        self._tensorboard, self._wandb, self._timers = get_tensorboard_writer(), get_wandb_writer(), get_timers()
        self._args = args

    def due(self) -> bool:
        """Return whether Megatron logs after the step that has ended."""
        return self._iteration % self._args.log_interval == 0 or self._writes

    def __call__(self, figures: Mapping[str, float]) -> None:
        try:
            if self._writes:
                self._write({f"timely-freeze/{name}": value for name, value in figures.items()})
        finally:  # the log gathers on all ranks at once: a writer that fails on one must not keep it from there
            if self._iteration % self._args.log_interval == 0:
                self._timers.log([TIMER], normalizer=self._args.log_interval)

    def _write(self, named: Mapping[str, float]) -> None:
        if self._tensorboard:
            for name, value in named.items():
                self._tensorboard.add_scalar(name, value, self._iteration)
        if self._wandb:
            self._wandb.log(named, self._iteration)

    @property
    def _iteration(self) -> int:
        """Return Megatron's count of finished iterations."""
        return int(self._args.curr_iteration) + 1

    @property
    def _writes(self) -> bool:
        has_writer = bool(self._tensorboard or self._wandb)
        return has_writer and self._iteration % self._args.tensorboard_log_interval == 0
