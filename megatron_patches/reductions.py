"""``logical_and_across_model_parallel_group`` and ``reduce_max_stat_across_model_parallel_group`` of a training loop.

Why here: after each optimizer step, ``train_step`` asks all ranks whether they updated and for the largest norm of
gradients, and ``training_log`` asks for the largest learning rate. Every rank waits for these reductions, also where
each rank already has the result. Both functions are looked up in the module of the loop. Not covered: other loops.

Versions: run on Megatron-LM 0.16.1; read in 0.17.1, 0.19.0 and main, and in Megatron-Bridge main. A loop without such a
function makes no such reduction, and nothing is replaced there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron_patches.patch import Patch, PatchError

_SUCCESSFUL, _LARGEST = "logical_and_across_model_parallel_group", "reduce_max_stat_across_model_parallel_group"


class Loop:
    """The reductions of a training loop in these modules."""

    def __init__(self, *modules: str) -> None:
        self.successful = tuple(Patch(module, _SUCCESSFUL, "input") for module in modules)
        self.largest = tuple(Patch(module, _LARGEST, "stat") for module in modules)


MEGATRON_LM = Loop("megatron.training.training")
BRIDGE = Loop("megatron.bridge.training.train", "megatron.bridge.training.utils.train_utils")
PATCHES = tuple(patch for loop in (MEGATRON_LM, BRIDGE) for patch in (*loop.successful, *loop.largest))


def apply(loop: Loop, successful: Callable[..., Any], largest: Callable[..., Any]) -> None:
    """Let ``successful(run, input)`` and ``largest(run, stat)`` answer the reductions of a loop."""
    for patches, handler in ((loop.successful, successful), (loop.largest, largest)):
        for patch in patches:
            with suppress(PatchError):  # this loop makes no such reduction
                patch.handle(handler)
