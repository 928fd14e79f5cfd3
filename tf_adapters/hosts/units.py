"""What of a module can be frozen on its own, and how much work that spares."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tf_adapters.selection.units import FreezeUnit


def units_of(parameters: Mapping[str, torch.nn.Parameter]) -> tuple[FreezeUnit, ...]:
    """One unit for each trainable tensor; what the user froze stays frozen and counts as no work."""
    return tuple(
        FreezeUnit((name,), float(parameter.numel()), tuple(parameter.shape))
        for name, parameter in parameters.items()
        if parameter.requires_grad and parameter.numel()
    )
