"""``is_pp_first_stage`` and ``is_pipeline_first_stage``: whether a rank has the first stage of a pipeline.

Why here: builders of models, the embedding's group, Float16Module and data loaders ask these two. They are imported by
name, so every loaded module gets the replacement. Megatron's schedules keep the original: their own account of tensors
assumes that rank 0 is first. The last stage needs no patch, since a V here has it on the last rank.

Versions: run on 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_patches.patch import Patch, handle_all

_UTILS, _STATE = "megatron.core.pipeline_parallel.utils", "megatron.core.parallel_state"
OF_GROUP = Patch(
    _UTILS, "is_pp_first_stage", "pp_group", everywhere=True, but=("megatron.core.pipeline_parallel.schedules",)
)
OF_RANK = Patch(_STATE, "is_pipeline_first_stage", "ignore_virtual", "vp_stage", everywhere=True)
PATCHES = (OF_GROUP, OF_RANK)


def apply(of_group: Callable[..., bool], of_rank: Callable[..., bool]) -> None:
    """Let ``of_group(run, process group)`` and ``of_rank(run, ignore_virtual, vp_stage)`` answer."""
    handle_all({OF_GROUP: of_group, OF_RANK: of_rank})
