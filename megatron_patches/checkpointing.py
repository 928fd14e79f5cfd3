"""``megatron.training.checkpointing``: adds our state to a Megatron-LM checkpoint.

Why here: ``generate_state_dict`` returns the dict that ``save_checkpoint`` writes, in every format. Entries that are
not sharded go to rank 0's common part. ``_load_base_checkpoint`` returns the dict that was read, before
``load_checkpoint`` removes its own entries. Both are looked up in their own module when they are called. Not covered:
Megatron's ``local`` and FSDP checkpoints, whose code was read but not run.

Versions: run on Megatron-LM 0.16.1; read in 0.19.0 and main, the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch, handle_all

_MODULE = "megatron.training.checkpointing"
SAVE = Patch(_MODULE, "generate_state_dict")
LOAD = Patch(_MODULE, "_load_base_checkpoint", "rank0")
PATCHES = (SAVE, LOAD)


def apply(key: str, to_save: Callable[[], Any], loaded: Callable[[Any], None]) -> None:
    """Save the value of ``to_save()`` under ``key`` (nothing for None), and pass a checkpoint's value to ``loaded``.

    ``loaded`` is not called when only a checkpoint's arguments are read.
    """

    def save(run: Callable[[], Any]) -> Any:
        state_dict, ours = run(), to_save()
        if ours is not None:
            state_dict[key] = ours
        return state_dict

    def load(run: Callable[[], Any], rank0: bool) -> Any:
        result = run()
        if not rank0 and result[0] is not None:
            loaded(result[0].get(key))
        return result

    handle_all({SAVE: save, LOAD: load})
