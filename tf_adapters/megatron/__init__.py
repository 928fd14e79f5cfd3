"""TimelyFreeze for Megatron-Core's pipeline schedules.

There are three ways to attach it, with the same result:

- ``torchrun ... -m tf_adapters.megatron pretrain_gpt.py ... --timely-freeze``: a Megatron-LM script, unchanged;
- ``tf_adapters.megatron.install()`` in such a script, before it parses its arguments;
- ``tf_adapters.megatron.attach(model_chunks, optimizer, config)`` for your own training loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tf_adapters.arguments import add_arguments
from tf_adapters.hosts.lazy import exported

if TYPE_CHECKING:
    from tf_adapters.megatron.entry import attach
    from tf_adapters.megatron.placing import place_in_v
    from tf_adapters.megatron.training import TrainingScript

__all__ = ["add_arguments", "attach", "install", "place_in_v", "revert"]
__getattr__ = exported("tf_adapters.megatron", {"attach": "entry", "place_in_v": "placing"})


_script: TrainingScript | None = None  # the script that this process runs


def install() -> TrainingScript:
    """Add the ``--timely-freeze`` arguments to a Megatron-LM script, and attach freezing if they enable it.

    Call it before the script parses its arguments; the order of imports does not matter. The returned handle has
    ``adapter`` and ``revert()``. A second call returns the same handle. Raises UnsupportedError if
    ``megatron.training`` cannot be imported or lacks a symbol.
    """
    from tf_adapters.megatron.training import TrainingScript

    global _script
    _script = _script or TrainingScript()
    _script.install()
    return _script


def revert() -> None:
    """Revert every patch of Megatron, and detach the adapter of ``install``. Detach other adapters first."""
    if _script is not None:
        _script.revert()
        return
    import megatron_patches
    from tf_adapters.megatron.patching import patching

    patching()(megatron_patches.revert_all)()
