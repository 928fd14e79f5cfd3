"""TimelyFreeze for DeepSpeed's pipeline engine.

There are three ways to attach it, with the same result:

- ``deepspeed --module tf_adapters.deepspeed train.py --deepspeed_config ds_config.json``: the script unchanged;
- ``tf_adapters.deepspeed.attach(engine)``: one line after ``deepspeed.initialize``;
- ``tf_adapters.deepspeed.initialize(...)`` instead of ``deepspeed.initialize(...)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tf_adapters.hosts.lazy import exported

if TYPE_CHECKING:
    from tf_adapters.deepspeed.entry import attach, initialize

__all__ = ["attach", "initialize"]
__getattr__ = exported("tf_adapters.deepspeed", dict.fromkeys(__all__, "entry"))
