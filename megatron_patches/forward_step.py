"""``megatron.core.pipeline_parallel.schedules.forward_step``: one microbatch's forward through one model chunk.

Why here: all three schedules of Megatron run every forward through this function. It is looked up in the module when it
is called, and its arguments include the microbatch. Not covered: the combined 1F1B schedule
(``overlap_moe_expert_parallel_comm``) and hybrid context parallelism have other forwards; both are refused.

Versions: run on 0.16.1 and 0.19.2; read in 0.17.1 and 0.18.1, the same signature by name.
"""

from __future__ import annotations

from megatron_patches.patch import Patch

PATCH = Patch("megatron.core.pipeline_parallel.schedules", "forward_step", "model", "current_microbatch")
PATCHES = (PATCH,)

apply = PATCH.handle
"""``apply(handler)``: ``handler(run, model chunk, microbatch or None)`` runs each forward and returns its result."""
