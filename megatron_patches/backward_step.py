"""``megatron.core.pipeline_parallel.schedules.backward_step``: one microbatch's backward through one model chunk.

Why here: all three schedules run every backward through it. Its arguments name neither the chunk nor the microbatch,
only the tensor that the forward returned, so the forward tags that tensor. Not covered: ``backward_step_multimodule``
(0.17 on), whose tensors come in dicts and take no tag.

Versions: run on 0.16.1 (with ``model_type``) and 0.19.2 (without); read in 0.17.1 and 0.18.1 (without).
"""

from __future__ import annotations

from megatron_patches.patch import Patch

PATCH = Patch("megatron.core.pipeline_parallel.schedules", "backward_step", "output_tensor")
PATCHES = (PATCH,)

apply = PATCH.handle
"""``apply(handler)``: ``handler(run, output)`` runs each backward and returns the host's result."""
