"""``PipelineParallelLayerLayout.from_str``: the layers of each rank, from ``--pipeline-model-parallel-layout``.

Why here: every TransformerConfig calls it on the class, and all that places layers asks its result.

Versions: run on 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch

PATCH = Patch(
    "megatron.core.transformer.pipeline_parallel_layer_layout",
    "PipelineParallelLayerLayout.from_str",
    "layout",
    "pipeline_model_parallel_size",
)
PATCHES = (PATCH,)


def apply(make: Callable[[str, int], Any]) -> None:
    """Let ``make(layout, pipeline size)`` return the layout."""
    PATCH.handle(lambda run, layout, size: make(layout, size))
