"""Replacements of Megatron functions: one small module for each symbol, applied and reverted separately.

A patch only redirects calls; ``tf_adapters.megatron`` decides what they do. Every module has ``apply`` and ``revert``.
If a version of Megatron lacks the symbol, ``apply`` raises PatchError, which names the symbol's path.
"""

from __future__ import annotations

from megatron_patches import (
    arguments,
    backward_step,
    checkpointing,
    communication,
    forward_backward,
    forward_step,
    model_setup,
    patch,
    reductions,
    train_state,
)
from megatron_patches.patch import Patch

ALL = (
    forward_backward,
    forward_step,
    backward_step,
    communication,
    arguments,
    model_setup,
    checkpointing,
    reductions,
    train_state,
)


def patches() -> tuple[Patch, ...]:
    """Every patch, applied or not."""
    single = (forward_step.PATCH, backward_step.PATCH, arguments.PATCH, model_setup.PATCH)
    checkpoints = (checkpointing.SAVE, checkpointing.LOAD, train_state.SAVE, train_state.LOAD)
    return (*forward_backward.PATCHES, *communication.PATCHES, *reductions.PATCHES, *single, *checkpoints)


def revert_all() -> None:
    """Restore every replaced symbol. Raises PatchError, and restores nothing, if other code has wrapped one."""
    patch.revert_all(patches())
