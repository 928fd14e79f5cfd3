"""TimelyFreeze for Megatron-Core's pipeline schedules.

Three ways in, the same result:

- ``torchrun ... -m tf_adapters.megatron pretrain_gpt.py ... --timely-freeze``: a Megatron-LM script, unchanged;
- ``tf_adapters.megatron.install()`` in such a script, before it parses its arguments;
- ``tf_adapters.megatron.attach(model_chunks, optimizer, config)`` for a training loop of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tf_adapters.arguments import add_arguments
from tf_adapters.hosts.lazy import exported

if TYPE_CHECKING:
    from tf_adapters.megatron.entry import attach
    from tf_adapters.megatron.training import TrainingScript

__all__ = ["add_arguments", "attach", "install", "revert"]
__getattr__ = exported("tf_adapters.megatron.entry", ["attach"])


_script: TrainingScript | None = None  # of this process, which runs one


def install() -> TrainingScript:
    """Give a Megatron-LM script the ``--timely-freeze`` arguments, and freezing where they ask for it.

    Call it before the script parses its arguments; what was imported before does not matter. The handle that it returns
    has ``adapter`` and ``revert()``; calling it twice does nothing more and returns the same one. Raises
    UnsupportedError where ``megatron.training`` cannot be imported or lacks a symbol.
    """
    from tf_adapters.megatron.training import TrainingScript

    global _script
    _script = _script or TrainingScript()
    _script.install()
    return _script


def revert() -> None:
    """Take every patch of Megatron back, and what ``install`` has attached. Detach other adapters first."""
    if _script is not None:
        _script.revert()
        return
    import megatron_patches
    from tf_adapters.megatron.patching import patching

    patching()(megatron_patches.revert_all)()
