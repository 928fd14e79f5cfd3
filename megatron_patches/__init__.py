"""Replacements of Megatron functions: one small module for each symbol, applied and reverted separately.

A patch only redirects calls; ``tf_adapters.megatron`` decides what they do. Each module has ``PATCHES``, and ``apply``,
which raises PatchError if a version of Megatron lacks the symbol. ``patch.revert_all(PATCHES)`` restores the symbols.
"""

from __future__ import annotations

from megatron_patches import (
    arguments,
    backward_step,
    checkpointing,
    communication,
    datasets,
    first_stage,
    forward_backward,
    forward_step,
    layer_layout,
    microbatch_data,
    model_setup,
    parallel_groups,
    patch,
    reductions,
    tied_embeddings,
    train_state,
    validated_arguments,
)

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
    validated_arguments,
    first_stage,
    parallel_groups,
    layer_layout,
    tied_embeddings,
    microbatch_data,
    datasets,
)


def patches() -> tuple[patch.Patch, ...]:
    """Return every patch, applied or not."""
    return tuple(each for module in ALL for each in module.PATCHES)


def revert_all() -> None:
    """Restore every replaced symbol. Raises PatchError, and restores nothing, if other code has wrapped one."""
    patch.revert_all(patches())
