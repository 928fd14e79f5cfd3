"""TimelyFreeze for DeepSpeed's pipeline engine.

Three ways in, the same result:

- ``deepspeed --module tf_adapters.deepspeed train.py --deepspeed_config ds_config.json``: the script unchanged;
- ``tf_adapters.deepspeed.attach(engine)``: one line after ``deepspeed.initialize``;
- ``tf_adapters.deepspeed.initialize(...)`` in the place of ``deepspeed.initialize(...)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_adapters.deepspeed.entry import attach, initialize

__all__ = ["attach", "initialize"]


def __getattr__(name: str) -> Any:
    """Import the host when it is needed: that takes seconds."""
    if name in __all__:
        from tf_adapters.deepspeed import entry

        return getattr(entry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
