"""What a report calls the device that computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["EMULATED", "device_name", "emulated"]

EMULATED = "emulated"

_emulations = 0  # that are going on in this process


@contextmanager
def emulated() -> Iterator[None]:
    """While operations last as long as on a device that is not there, name it so."""
    global _emulations
    _emulations += 1
    try:
        yield
    finally:
        _emulations -= 1


def device_name(device: torch.device) -> str:
    """Its type, such as "cuda", or "emulated"."""
    return EMULATED if _emulations else device.type
