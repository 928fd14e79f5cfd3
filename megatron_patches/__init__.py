"""What freezing replaces in Megatron: one small module for each symbol, each applied and taken back on its own.

``tf_adapters.megatron`` decides what happens there; a patch only lets it. Every module has ``apply`` and
``revert``; a symbol that a version of Megatron does not have is a PatchError that names its path.
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
    train_state,
)
from megatron_patches.patch import Patch

ALL = (forward_backward, forward_step, backward_step, communication, arguments, model_setup, checkpointing, train_state)


def patches() -> tuple[Patch, ...]:
    """Every patch, applied or not."""
    single = (forward_step.PATCH, backward_step.PATCH, arguments.PATCH, model_setup.PATCH)
    checkpoints = (checkpointing.SAVE, checkpointing.LOAD, train_state.SAVE, train_state.LOAD)
    return (*forward_backward.PATCHES, *communication.PATCHES, *single, *checkpoints)


def revert_all() -> None:
    """Put back every symbol that is replaced. Raises PatchError, with none put back, where others wrapped one."""
    for patch in patches():
        patch.check_revert()
    for patch in patches():
        patch.revert()
