"""``TrainState`` of Megatron-Bridge: the progress of a run, which every checkpoint holds.

Why here: ``save_checkpoint`` writes the value of ``state_dict`` in every format and place: at once or later by another
process, on a disk or in an object store, global or local. ``load_checkpoint`` makes a new TrainState from it. Both
accept further entries, so a checkpoint with our entry loads without this package, and one without it loads with it.

Versions: run on Megatron-Bridge 0.3.1; read in 0.3.0, 0.4.2, 0.5.1, 0.6.2 and main, the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch, handle_all

_MODULE = "megatron.bridge.training.state"
SAVE = Patch(_MODULE, "TrainState.state_dict", "self")
LOAD = Patch(_MODULE, "TrainState.load_state_dict", "self", "state_dict")
PATCHES = (SAVE, LOAD)


def apply(key: str, to_save: Callable[[Any], Any]) -> None:
    """Save the tensor that ``to_save(train_state)`` returns under ``key`` (nothing for None).

    A loaded TrainState has it as the attribute ``key``, or None. It thus reaches all ranks when rank 0 reads a
    checkpoint and sends the object.
    """

    def save(run: Callable[[], Any], train_state: Any) -> Any:
        state_dict, ours = run(), to_save(train_state)
        return state_dict if ours is None else {**state_dict, key: ours}

    def load(run: Callable[[], Any], train_state: Any, state_dict: Any) -> Any:
        result = run()
        setattr(train_state, key, state_dict.get(key))
        return result

    handle_all({SAVE: save, LOAD: load})
