"""TimelyFreeze for TorchTitan jobs: ``torchrun ... -m tf_adapters.torchtitan <its arguments> --timely_freeze.enable``.

The pipeline is torch.distributed.pipelining's, so freezing is that host's; here are TorchTitan's arguments, TOML files,
checkpoints and logs. A script of your own calls ``tf_adapters.torchtitan.install(settings)`` before it trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tf_adapters.hosts.lazy import exported

if TYPE_CHECKING:
    from tf_adapters.torchtitan.training import install

__all__ = ["install"]
__getattr__ = exported("tf_adapters.torchtitan.training", __all__)
