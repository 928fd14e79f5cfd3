"""TimelyFreeze for TorchTitan jobs: ``torchrun ... -m tf_adapters.torchtitan <its arguments> --timely_freeze.enable``.

The pipeline is torch.distributed.pipelining's, so freezing is that host's; here are TorchTitan's arguments, TOML files,
checkpoints and logs. A script of your own calls ``tf_adapters.torchtitan.install(settings)`` before it trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_adapters.torchtitan.training import install

__all__ = ["install"]


def __getattr__(name: str) -> Any:
    """Import the host when it is needed: that takes seconds."""
    if name in __all__:
        from tf_adapters.torchtitan import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
