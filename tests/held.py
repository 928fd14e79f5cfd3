"""Which rows of a parameter a whole step froze, told from its masks alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tf_adapters.selection.rows import FrozenRows
from tf_adapters.testing import clear_rows

Key = tuple[int, int]
"""Stage and microbatch."""


def held_rows(
    masks: Mapping[Key, tuple[str, ...]], rows: Mapping[Key, tuple[FrozenRows, ...]], stage: int, name: str, total: int
) -> torch.Tensor:
    """Bools ``[total]``: whether every microbatch froze the row."""
    trained = torch.zeros(total)
    for key, names in masks.items():
        if key[0] == stage and name not in names:
            kept = torch.ones(total)
            for part in rows[key]:
                clear_rows(kept if name in part.names else None, part)
            trained += kept
    return trained == 0
